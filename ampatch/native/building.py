"""Compiles the native part into the cache.  Never called while a script trains."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import AmpatchError
from . import loading

try:
    import fcntl
except ImportError:  # Windows: processes may build at once; each writes a complete file
    fcntl = None  # type: ignore[assignment]

_MAX_OUTPUT_LINES = 20  # of the compiler's output in an error message
_BUILD_TIMEOUT = 300  # seconds


def missing() -> str | None:
    """Return what a build lacks here and how to get it, or None.  Starts no process."""
    if loading.is_free_threaded():
        return (
            "the native part needs a Python with the GIL, and this one has none. "
            "ampatch works without it."
        )
    if importlib.util.find_spec("setuptools") is None:
        return (
            "torch builds extensions with setuptools, which is missing. Run: pip install setuptools"
        )
    if os.name != "posix":
        return None
    name = shlex.split(_compiler())[0]
    if shutil.which(name) is None:
        return (
            f"there is no C++ compiler {name!r}. Install one (Debian and Ubuntu: apt-get install "
            "g++), or set CXX to the one to use."
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return (
            f"Python's header Python.h is not in {headers}. Install it (Debian and Ubuntu: "
            "apt-get install python3-dev)."
        )
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "").strip() or "c++"


def build(again: bool = True, verbose: bool = False) -> Path:
    """Compile the native part for this torch and Python.  Takes about half a minute.

    Returns the file in the cache, which appears there complete or not at all.  Processes that build
    at once take turns.  Without `again`, an existing build is returned, and the error of a failed
    build is raised again.  `verbose`: show the compiler's output.

    Raises `AmpatchError` if something that a build needs is missing, or if it does not compile.
    """
    lacking = missing()
    if lacking is not None:
        raise AmpatchError(f"ampatch build: {lacking}")
    target, failure = loading.built_file(), loading.failure_file()
    try:
        loading.cache().mkdir(parents=True, exist_ok=True)
        with _hold_build_lock():
            if not again and failure.is_file():
                raise AmpatchError(failure.read_text(encoding="utf-8"))
            if again or not target.is_file():
                failure.unlink(missing_ok=True)
                _make(target, verbose)
    except OSError as error:
        raise AmpatchError(
            f"ampatch build: the cache {loading.cache()} cannot be written: {error}. Set "
            "AMPATCH_CACHE to a folder that can."
        ) from error
    return target


def clean() -> int:
    """Remove every build from the cache; returns how many there were."""
    builds = [path for path in loading.cache().glob("*") if path.suffix in (".so", ".pyd")]
    shutil.rmtree(loading.cache(), ignore_errors=True)
    return len(builds)


@contextlib.contextmanager
def _hold_build_lock() -> Iterator[None]:
    """Context manager: no other process builds into this cache at the same time."""
    with open(loading.cache() / ".lock", "ab") as lock:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks is like Windows
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        yield


def _make(target: Path, verbose: bool) -> None:
    """Compile into `target`; a failure is written to a file for the next process."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=loading.cache()) as folder:
        try:
            library = _compile(Path(folder), verbose)
        except AmpatchError as error:
            loading.failure_file().write_text(str(error), encoding="utf-8")
            raise
        os.replace(library, target)


def _compile(folder: Path, verbose: bool) -> Path:
    """Build the library in `folder`, and import it once in a child process."""
    for name, source in loading.sources().items():
        (folder / name).write_bytes(source)
    try:
        exit_code, text = _run_command(folder, verbose)
    except subprocess.TimeoutExpired:
        raise AmpatchError(
            f"ampatch build: it did not compile within {_BUILD_TIMEOUT} s. Run ampatch build again "
            "when the machine has less to do."
        ) from None
    if exit_code != 0:
        output = ["It is above."]
        if not verbose:
            output = ["The last lines of its output:", *text.splitlines()[-_MAX_OUTPUT_LINES:]]
        raise AmpatchError(
            "ampatch build: the C++ source does not compile or load here (exit status "
            f"{exit_code}). Expected a C++ compiler that this torch supports; CXX names "
            "another one.\n" + "\n".join(output)
        )
    [library] = folder.glob(f"{loading.NAME}.*")
    return library


def _run_command(folder: Path, verbose: bool) -> tuple[int, str]:
    """Run `command(folder)`.  Returns its exit code and output ("" if `verbose` shows it).

    The compiler is a child of the command.  It is killed too, after `_BUILD_TIMEOUT` and on
    KeyboardInterrupt.
    """
    pipe = None if verbose else subprocess.PIPE
    with subprocess.Popen(
        command(folder),
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe and subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            text, _ = child.communicate(timeout=_BUILD_TIMEOUT)
        except BaseException:
            if hasattr(os, "killpg"):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            raise
    return child.returncode, text or ""


def command(folder: Path) -> list[str]:
    """The command that compiles the sources in `folder` and imports the library once."""
    script = Path(__file__).resolve().with_name("in_child.py")
    return [sys.executable, str(script), loading.NAME, loading.SOURCES[0], str(folder)]


def _environment() -> dict[str, str]:
    """The environment of `command`: modules as in this process, and CC and CXX for C++."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    if os.name == "posix":
        environment["CXX"] = environment["CC"] = _compiler()
    return environment
