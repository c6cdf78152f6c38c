"""The parent's side: one process per planned run, watched until it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ampatch.config.environment import VARIABLES
from ampatch.sweep.order import Order
from ampatch.sweep.output_metrics import read_metrics
from ampatch.sweep.plan import counts_its_steps, placeholders
from ampatch.sweep.progress import Progress
from ampatch.sweep.record import Measured, Planned, Run, read_json, write_json

POLL = 0.1  # seconds between two looks at the child
GRACE = 10.0  # seconds a child has, once told to end, to write its record


@dataclass(frozen=True)
class Files:
    """The files of one run in the directory of runs."""

    run: Path
    record: Path  # the child's, until the run has ended
    progress: Path
    log: Path

    @classmethod
    def of(cls, directory: Path, planned: Planned) -> Files:
        ends = ("json", "record", "progress", "log")
        return cls(*(directory / f"{planned.file_stem}.{end}" for end in ends))

    def remove(self) -> None:
        """Take away what an earlier run left here."""
        for path in (self.run, self.record, self.progress, self.log):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Runner:
    """How to run the script; `directory` is that of the runs.

    `steps` ends the script after so many, unless its arguments hold `{steps}`;
    `metrics` are regular expressions over its output; `timeout` is in seconds.
    """

    script: str
    arguments: Sequence[str]
    directory: Path
    steps: int | None = None
    metrics: Mapping[str, str] | None = None
    timeout: float | None = None
    auto: bool = False  # a script without AMP code

    def run(self, planned: Planned, progress: Progress) -> Run:
        """Run the script in a fresh process, and keep what it measured.

        The child and what it started never outlive this call, whichever way it is
        left; killed, this process takes them along.
        """
        files = Files.of(self.directory, planned)
        files.remove()
        started = time.monotonic()
        with self._child(planned, files) as child:
            in_time = _watch(child, files, started, self.timeout, progress)
            if not in_time:
                _end(child)
        run = Run(
            planned,
            child.returncode,
            time.monotonic() - started,
            self._measured(files),
            ended_by="" if in_time else f"timed out: after {self.timeout:g} s",
            timeout=self.timeout,
        )
        write_json(files.run, run.to_json())
        files.progress.unlink(missing_ok=True)
        files.record.unlink(missing_ok=True)
        return run

    def _measured(self, files: Files) -> Measured | None:
        data = read_json(files.record)
        if data is None:
            return None
        measured = Measured.from_json(data)
        measured.metrics.update(read_metrics(files.log, self.metrics or {}, measured))
        return measured

    @contextmanager
    def _child(self, planned: Planned, files: Files) -> Iterator[subprocess.Popen[bytes]]:
        """The running child; ended, with all it started, when the block is left.

        In a session of its own, so that it can be ended together with the processes
        it starts.  Ctrl-C therefore reaches the sweep alone, which ends the child.
        """
        guard, ours = os.pipe() if hasattr(os, "killpg") else (None, None)
        try:
            with files.log.open("wb") as log:
                child = subprocess.Popen(
                    self._command(planned, files, guard),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(planned),
                    start_new_session=True,
                    pass_fds=() if guard is None else (guard,),
                )
            try:
                yield child
            finally:
                if child.poll() is None:
                    _end(child)
        finally:
            for end in (guard, ours):  # the guard in the child's group sees it, and ends the rest
                if end is not None:
                    os.close(end)

    def _command(self, planned: Planned, files: Files, guard: int | None) -> list[str]:
        case = planned.case
        ordered = Order(
            seed=planned.seed,
            steps=None if counts_its_steps(self.arguments) else self.steps,
            tf32=case.tf32,
            auto=self.auto,
            autocast=(case.dtype or "") if case.engine == "autocast" else "",
            mark_output=bool(self.metrics),
            guard=guard,
        )
        module = [sys.executable, "-m", "ampatch.sweep.child", str(files.record)]
        arguments = placeholders(self.arguments, planned.seed, self.steps)
        return [*module, ordered.to_text(), self.script, *arguments]


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


def _environment(planned: Planned) -> dict[str, str]:
    """Our environment, with the variables that say how to run replaced by the plan's."""
    environment = {**os.environ, "AMPATCH_ENABLED": "1", "PYTHONUNBUFFERED": "1"}
    for name in set(VARIABLES) - {"AMPATCH_ENABLED"}:
        environment.pop(name, None)
    environment["AMPATCH_SEED"] = str(planned.seed)
    environment.setdefault("PYTHONHASHSEED", str(planned.seed))
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        # Not installed, but found from where this process was started.
        paths = [environment.get("PYTHONPATH"), root]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**environment, **planned.case.environment}
