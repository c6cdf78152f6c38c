"""Compiles the native part into the cache.  Never called while a script trains."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import AmpatchError
from . import loading, toolchain

try:
    import fcntl
except ImportError:  # Windows: several processes may build at once, each of them a whole file
    fcntl = None  # type: ignore[assignment]

_LINES = 20  # of the compiler's output in an error
_PAUSE = 0.1  # seconds between two looks

Watch = Callable[[], None]
"""Called while something goes on; it may raise to end it."""


def build(again: bool = True, verbose: bool = False, watch: Watch = lambda: None) -> Path:
    """Compile the native part for this torch and Python; about half a minute.

    Returns the file in the cache, which appears there whole or not at all.  Processes that build at
    once take turns.  Without `again` a file that is there then is the answer, and so is the
    error of a build that failed.  `verbose`: show what the compiler says.

    Raises `AmpatchError` if something that it needs is missing, or if it does not compile.
    """
    lacking = toolchain.missing()
    if lacking is not None:
        raise AmpatchError(f"ampatch build: {lacking}")
    target = loading.built_file()
    try:
        loading.cache().mkdir(parents=True, exist_ok=True)
        with _alone(watch):
            if again or not target.is_file():
                _make(target, again, verbose, watch)
    except OSError as error:
        raise AmpatchError(
            f"ampatch build: the cache {loading.cache()} cannot be written: {error}. Set "
            "AMPATCH_CACHE to a folder that can."
        ) from error
    return target


def clean() -> int:
    """Remove every build from the cache; returns how many there were."""
    found = [path for path in loading.cache().glob("*") if path.name != _LOCK]
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return sum(toolchain.versions_of(path.name) is not None for path in found)


_LOCK = ".lock"


@contextlib.contextmanager
def _alone(watch: Watch) -> Iterator[None]:
    """No other process of this cache builds meanwhile."""
    with open(loading.cache() / _LOCK, "ab") as lock:
        while not _is_ours(lock.fileno()):
            watch()
            time.sleep(_PAUSE)
        yield


def _is_ours(lock: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: as on Windows
        return True
    return True


def _make(target: Path, again: bool, verbose: bool, watch: Watch) -> None:
    """Compile into `target`; a failure is noted for the next who asks."""
    failed = None if again else loading.failure()
    if failed is not None:
        raise AmpatchError(failed)
    note = loading.failure_file()
    with tempfile.TemporaryDirectory(prefix=".building-", dir=loading.cache()) as folder:
        try:
            made = _compile(Path(folder), verbose, watch)
        except AmpatchError as error:
            note.write_text(f"{toolchain.compiler()}\n{error}", encoding="utf-8")
            raise
        os.replace(made, target)
    note.unlink(missing_ok=True)


def _compile(folder: Path, verbose: bool, watch: Watch) -> Path:
    """The library, made in `folder` and imported once."""
    for name, text in loading.sources().items():
        (folder / name).write_bytes(text)
    output = folder / "output.txt"
    command = toolchain.command(folder / toolchain.SOURCES[0], folder)
    status = _run(command, None if verbose else output, watch)
    if status != 0:
        said = ["It is above."]
        if not verbose:
            last = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
            said = ["The last lines of its output:", *last]
        raise AmpatchError(
            f"ampatch build: the C++ source does not compile or load here (exit status {status}). "
            "Expected a C++ compiler that this torch supports; CXX names another one.\n"
            + "\n".join(said)
        )
    [made] = folder.glob(f"{toolchain.NAME}.*")
    return made


def _run(command: list[str], output: Path | None, watch: Watch) -> int:
    """The exit status of a command that ends, with what it has started, if this is interrupted."""
    with contextlib.ExitStack() as stack:
        to = stack.enter_context(output.open("wb")) if output is not None else None
        process = subprocess.Popen(
            command,
            cwd=Path(command[-1]),
            env=toolchain.environment(),
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=to and subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                watch()
                time.sleep(_PAUSE)
        finally:
            if process.poll() is None:
                _end(process)
    return process.returncode


def _end(process: subprocess.Popen) -> None:
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
