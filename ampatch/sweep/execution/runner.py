"""Runs each trial in a separate process, and waits until the process has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampatch.config.environment import VARIABLES
from ampatch.launch.program import Program
from ampatch.launch.script import PACKAGE_ROOT
from ampatch.sweep.cases_and_trials import SEED_VARIABLE, fill_placeholders
from ampatch.sweep.execution import ranks, user_files
from ampatch.sweep.execution.directory import DIRECTORY_VARIABLE, RunFiles
from ampatch.sweep.execution.placement import Placement
from ampatch.sweep.execution.warm_starts import POLL, ForkedTrial, WarmStarts
from ampatch.sweep.json_files import from_json, read_json, to_json, write_json
from ampatch.sweep.kinds import FRAMEWORK, UNKNOWN_KIND, Kind
from ampatch.sweep.measure.output_metrics import read_metrics
from ampatch.sweep.measure.run_record import Measured, Run
from ampatch.sweep.trial import BASE, Trial

GRACE_SECONDS = 10.0  # seconds from SIGTERM to SIGKILL, in which a child writes what it measured


@dataclass(frozen=True)
class TrialProgress:
    """How far a trial has come: its optimizer steps, latest loss, and the kind of its script."""

    steps: int
    loss: float | None = None
    kind: Kind = UNKNOWN_KIND


class Cancelled(Exception):
    """The trial was ended because its result is no longer needed."""


class TrialControl:
    """Passed to `Runner.run`: calls `report` with new progress, and can end the trial.

    Another thread ends the trial by setting the event `cancelled`; the script then has
    `GRACE_SECONDS` to end.  Setting `killed` as well cuts this wait short.  With `warm` the trial
    is forked from a process that has imported torch, if possible.
    """

    def __init__(
        self, report: Callable[[TrialProgress], None], warm: WarmStarts | None = None
    ) -> None:
        self._report, self.warm = report, warm
        self._last: TrialProgress | None = None
        self.cancelled, self.killed = threading.Event(), threading.Event()

    def raise_if_cancelled(self) -> None:
        """Raise `Cancelled` if the trial was cancelled."""
        if self.cancelled.is_set():
            raise Cancelled

    def report_progress(self, file: Path) -> None:
        """Report new progress in the file.  Raises `Cancelled` if the trial was cancelled."""
        self.raise_if_cancelled()
        data = read_json(file)
        progress = None if data is None else from_json(TrialProgress, data)
        if progress not in (None, self._last):
            self._last = progress
            self._report(progress)


@dataclass(frozen=True)
class Runner:
    """How to run the script; can be pickled, because engines run it on other machines."""

    program: Program
    arguments: Sequence[str]
    directory: Path  # folder for the files of the runs
    steps: int | None = None  # optimizer steps after which a script without {steps} is ended
    metrics: Mapping[str, str] | None = None  # names and regular expressions for the output
    timeout: float | None = None  # seconds
    kind: Kind = UNKNOWN_KIND  # kind of the script
    override_seeds: bool = False  # derive the script's seeds from the trial's
    processes: int | None = None  # torchrun processes per trial; None: one without torchrun
    probe: tuple[str, str] | None = None
    """(module, text): each child imports the module, calls `start(text, autocast_off, writes)`."""
    in_copy: bool = False  # run each trial in a copy of the current folder

    def run(self, trial: Trial, control: TrialControl, placement: Placement) -> Run:
        """Run the script in a separate process, and write the measurements to a file.

        The child and the processes it starts end with this call, also after an exception,
        and also when this process is killed.  Raises `Cancelled` if `control` was cancelled.
        """
        files = RunFiles.of(self.directory, trial)
        files.remove()
        here, excluded = Path.cwd(), self.directory.parent  # excluded: the sweep's own files
        is_first = trial == Trial(BASE)
        script_folder = self.program.file().resolve().parent
        folders = [here] if script_folder.is_relative_to(here) else [here, script_folder]
        times_before = {}
        if is_first and not self.in_copy:
            times_before = user_files.change_times(folders, excluded)
        copy = user_files.copy_of(here, files.copy, excluded) if self.in_copy else nullcontext()
        with copy, files.script_directory(), self._child(trial, files, placement, control) as child:
            started, started_wall_time = time.monotonic(), time.time()
            in_time = _wait(child, files, started, self.timeout, control)
            if not in_time:
                _end(child, control)
        times_after = user_files.change_times(folders, excluded) if times_before else {}
        measured = self._measured(files)
        if child.returncode and self.processes:
            measured = ranks.with_rank_errors(measured, files)
        is_first_copy = is_first and self.in_copy
        run = Run(
            trial, child.returncode, time.monotonic() - started, measured,
            ended_by="" if in_time else f"timed out: after {self.timeout:g} s",
            timeout=self.timeout, alone=placement.alone,
            imports=_import_seconds(child, started_wall_time, measured) if control.warm else 0.0,
            host=socket.gethostname(), devices=placement.devices,
            wrote=user_files.changed_names(times_before, times_after),
            linked=user_files.linked_entries(here, excluded) if is_first_copy else [],
        )  # fmt: skip
        write_json(files.run, run.to_json())
        if control.warm is not None:
            control.warm.store_imports(read_json(files.imports))
        files.remove_temporary_files()
        return run

    def _measured(self, files: RunFiles) -> Measured | None:
        data = read_json(files.measured)
        if data is None:
            return None
        measured = from_json(Measured, data)
        measured.metrics.update(read_metrics(files.log, self.metrics or {}))
        return measured

    @contextmanager
    def _child(
        self, trial: Trial, files: RunFiles, placement: Placement, control: TrialControl
    ) -> Iterator[subprocess.Popen[bytes] | ForkedTrial]:
        """Yields the running child.  On exit, kills it and every process that it started.

        The child leads a process group of its own, so that one signal reaches the processes it
        starts as well.  Ctrl-C therefore reaches only the sweep, which ends the child.
        """
        guard_pipe, write_end = os.pipe() if hasattr(os, "killpg") else (None, None)
        request = {"runner": self, "trial": trial, "guard": guard_pipe, "list_imports": False}
        environment = placement.apply(_environment(trial, files))
        child: subprocess.Popen[bytes] | ForkedTrial | None = None
        try:
            with files.log.open("wb") as log:
                # A framework's script starts cold: the integration must be imported first.
                warm = control.warm
                can_fork = warm is not None and guard_pipe is not None and not self.in_copy
                if can_fork and self.kind.name != FRAMEWORK:
                    request["list_imports"] = warm.needs_imports
                    descriptors = (log.fileno(), guard_pipe)
                    child = warm.start(
                        to_json(request), environment, descriptors, control.raise_if_cancelled
                    )
                child = child or subprocess.Popen(
                    self._command(request, files), stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, env=environment,
                    cwd=files.copy if self.in_copy else None, start_new_session=True,
                    pass_fds=() if guard_pipe is None else (guard_pipe,),
                )  # fmt: skip
            try:
                yield child
            finally:
                if child.poll() is None:
                    _end(child, control)
        finally:
            # When `write_end` closes, the guard process of the child kills what is left of it.
            for descriptor in (guard_pipe, write_end):
                if descriptor is not None:
                    os.close(descriptor)

    def script_arguments(self, trial: Trial) -> list[str]:
        """The script's arguments, with placeholders replaced."""
        directory = str(RunFiles.of(self.directory, trial).directory.resolve())
        return fill_placeholders(self.arguments, trial.seed, self.steps, directory)

    def _command(self, request: dict[str, Any], files: RunFiles) -> list[str]:
        launcher = [sys.executable, "-m"]
        if self.processes is not None:
            launcher += ranks.torchrun_arguments(self.processes, files.ranks)
        return [*launcher, "ampatch.sweep.execution.child", json.dumps(to_json(request))]


def _import_seconds(child: object, started_wall_time: float, measured: Measured | None) -> float:
    """Seconds from the start of a cold child to the start of its recorder; 0 for a forked child."""
    began = measured.machine.get("began") if measured else None
    return (
        0.0
        if began is None or isinstance(child, ForkedTrial)
        else max(0.0, began - started_wall_time)
    )


def _wait(
    child: subprocess.Popen[bytes] | ForkedTrial, files: RunFiles, started: float,
    timeout: float | None, control: TrialControl,
) -> bool:  # fmt: skip
    """Wait for the child and report its progress.  Returns False after `timeout` seconds."""
    while child.poll() is None:
        if timeout is not None and time.monotonic() - started > timeout:
            return False
        time.sleep(POLL)
        control.report_progress(files.progress)
    return True


def _end(child: subprocess.Popen[bytes] | ForkedTrial, control: TrialControl) -> None:
    """Send SIGTERM to the child's process group, and SIGKILL after `GRACE_SECONDS`."""
    _signal(child, signal.SIGTERM)
    try:
        deadline = time.monotonic() + GRACE_SECONDS
        while child.poll() is None and time.monotonic() < deadline and not control.killed.is_set():
            time.sleep(POLL)
    finally:
        _signal(child, getattr(signal, "SIGKILL", signal.SIGTERM))
        child.wait()


def _signal(child: subprocess.Popen[bytes] | ForkedTrial, number: int) -> None:
    """Send a signal to the child's process group, or to the child if there are no groups."""
    if not hasattr(os, "killpg"):
        child.send_signal(number)
        return
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return  # all processes of the group have ended


MALLOC_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # in bytes; the largest value that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**27),
}
"""Variables that make glibc keep freed memory; the user's own values have precedence.

By default glibc returns large blocks to the system and requests them again, in some processes twice
as often as in others.  The same step then takes 10 to 20 % longer, at any opt level.
"""


def _environment(trial: Trial, files: RunFiles) -> dict[str, str]:
    """This process's environment, with the variables of ampatch replaced by the trial's."""
    fixed = {"AMPATCH_ENABLED": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    environment = {**MALLOC_VARIABLES, **os.environ, **fixed}
    for name in set(VARIABLES) - {"AMPATCH_ENABLED"}:
        environment.pop(name, None)
    environment[SEED_VARIABLE] = str(trial.seed)
    environment[DIRECTORY_VARIABLE] = str(files.directory.resolve())
    environment.setdefault("PYTHONHASHSEED", "0")  # forked trials share a hash seed as well
    if PACKAGE_ROOT not in map(sysconfig.get_path, ("purelib", "platlib")):
        # ampatch runs from a source folder: add the folder to the child's path.
        paths = filter(None, [environment.get("PYTHONPATH"), PACKAGE_ROOT])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return {**environment, **trial.case.environment}
