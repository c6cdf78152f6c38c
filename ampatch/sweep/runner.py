"""The parent's side: one process per case, watched until it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ampatch.sweep.progress import Progress
from ampatch.sweep.record import Case, Measured, Run, read_json, write_json

POLL = 0.1  # seconds between two looks at the child
GRACE = 10.0  # seconds a child has, once told to end, to write its record


@dataclass(frozen=True)
class Files:
    """The files of one case in the sweep's directory."""

    record: Path
    progress: Path
    log: Path

    @classmethod
    def of(cls, directory: Path, case: Case) -> Files:
        return cls(*(directory / f"{case.label}.{end}" for end in ("json", "progress", "log")))

    def remove(self) -> None:
        """Take away what an earlier sweep left here."""
        for path in (self.record, self.progress, self.log):
            path.unlink(missing_ok=True)


def run_case(
    case: Case,
    script: str,
    arguments: Sequence[str],
    directory: Path,
    timeout: float | None,
    progress: Progress,
) -> Run:
    """Run `script` at `case` in a fresh process, and keep what it measured.

    The child never outlives this call, whichever way it is left.
    """
    files = Files.of(directory, case)
    files.remove()
    started = time.monotonic()
    with _child(case, script, arguments, files) as child:
        in_time = _watch(child, files, started, timeout, progress)
        if not in_time:
            _end(child)
    measured = read_json(files.record)
    run = Run(
        case,
        child.returncode,
        time.monotonic() - started,
        None if measured is None else Measured.from_json(measured),
        ended_by="" if in_time else f"timed out: after {timeout:g} s",
    )
    files.progress.unlink(missing_ok=True)
    write_json(files.record, run.to_json())
    return run


@contextmanager
def _child(
    case: Case, script: str, arguments: Sequence[str], files: Files
) -> Iterator[subprocess.Popen[bytes]]:
    """The running child; ended, if it still runs, when the block is left.

    In a session of its own, so that it can be ended together with the processes
    it starts.  Ctrl-C therefore reaches the sweep alone, which ends the child.
    """
    command = [sys.executable, "-m", "ampatch.sweep.child", str(files.record), script, *arguments]
    with files.log.open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(case),
            start_new_session=True,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            _end(child)


def _watch(
    child: subprocess.Popen[bytes],
    files: Files,
    started: float,
    timeout: float | None,
    progress: Progress,
) -> bool:
    """Wait for the child, showing how far it is; whether it ended in time."""
    while child.poll() is None:
        if timeout is not None and time.monotonic() - started > timeout:
            return False
        time.sleep(POLL)
        reached = read_json(files.progress)
        if reached is not None:
            loss = reached["loss"]
            progress.reached(reached["steps"], None if loss is None else float(loss))
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask the child to end, then end it with everything it started."""
    _signal(child, signal.SIGTERM)
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass  # it did not listen; the next signal asks nobody
    finally:
        _signal(child, getattr(signal, "SIGKILL", signal.SIGTERM))
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the child's whole group, or where there is none to the child."""
    if not hasattr(os, "killpg"):
        child.send_signal(number)
        return
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return  # the whole group has ended


def _environment(case: Case) -> dict[str, str]:
    """Our environment, with the variables `initialize` reads replaced by the case's."""
    environment = {**os.environ, "AMPATCH_ENABLED": "1", "PYTHONUNBUFFERED": "1"}
    for name in ("AMPATCH_OPT_LEVEL", "AMPATCH_DTYPE"):
        environment.pop(name, None)
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        # Not installed, but found from where this process was started.
        paths = [environment.get("PYTHONPATH"), root]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**environment, **case.environment}
