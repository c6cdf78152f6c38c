"""The engine of a SLURM cluster, through submitit: each trial is a job.

The sweep's directory has to be on a file system that all nodes share: a job writes its run
and its log there.  Jobs outlive a sweep that is killed; `jobs.json` has their numbers, so
that a resumed sweep waits for those that still run.  Timed trials get a node for themselves
(`--exclusive`), and all of them the node of the first.

With the parameter `cluster=local` submitit runs the jobs on this machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from ampatch.config.sweep_options import SweepOptions
from ampatch.sweep.execution.engines.protocol import (
    RETRIES,
    Ended,
    EngineError,
    Event,
    Failed,
    Lost,
    Reached,
    Started,
)
from ampatch.sweep.execution.place import Place, thread_variables
from ampatch.sweep.execution.run_files import RunFiles
from ampatch.sweep.execution.runner import Runner, python_path, reached_in
from ampatch.sweep.execution.watching import Cancelled, Watch
from ampatch.sweep.json_files import read_json, write_json
from ampatch.sweep.measure.record import Run
from ampatch.sweep.plan import literal
from ampatch.sweep.trial import Trial

FOLDER = "slurm"
MINUTES = 240  # of a job, unless timeout_min or time is given
GRACE = 15.0  # seconds for cancelled jobs of this machine to end
ASK = 30.0  # seconds between two questions to SLURM; results are seen without asking
_FINAL = ("CANCELLED", "TIMEOUT", "OUT_OF_MEMORY")  # states after which a retry is in vain
_GENERAL = (
    "name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node",
    "stderr_to_stdout",
)  # fmt: skip
"""What submitit names alike for all clusters; its other parameters begin with "slurm_"."""


@dataclass
class _Job:
    """A submitted trial."""

    trial: Trial
    runner: Runner
    alone: bool
    handle: submitit.Job
    attempts: int = 1
    started: bool = False
    reached: Any = None


class SlurmEngine:
    """Submits jobs; `directory` is the sweep's."""

    def __init__(self, options: SweepOptions, directory: Path) -> None:
        self._options = options
        parameters = {name: literal(value) for name, value in options.slurm.items()}
        self._cluster = parameters.pop("cluster", "slurm")
        self._parameters = {**_asked(options), **parameters}
        self._folder = directory / FOLDER
        self._noted = self._folder / "jobs.json"
        self._jobs: dict[str, _Job] = {}  # by the stem of the trial's files
        self._asked = time.monotonic()

    def __enter__(self) -> SlurmEngine:
        self._executor(alone=False)
        notes = read_json(self._noted) or {"node": None, "jobs": {}}
        self._node: str | None = notes["node"]
        self._earlier: dict[str, str] = notes["jobs"] if self._cluster == "slurm" else {}
        return self

    def __exit__(self, *exception: object) -> None:
        handles = [job.handle for job in self._jobs.values()]
        with _undisturbed():
            for handle in handles:
                handle.cancel(check=False)
        self._jobs.clear()
        self._note()
        end = time.monotonic() + GRACE
        while self._cluster != "slurm" and not all(handle.done() for handle in handles):
            if time.monotonic() > end:
                break  # they end as soon as this process has
            time.sleep(0.1)

    def has_room(self) -> bool:
        return self._options.jobs is None or len(self._jobs) < self._options.jobs

    def submit(self, runner: Runner, trial: Trial, alone: bool) -> None:
        number = self._earlier.pop(trial.file_stem, None)
        if number is None:
            RunFiles.of(runner.directory, trial).remove()
            handle = self._submit(runner, trial, alone)
        else:
            handle = submitit.SlurmJob(self._folder, number)
        self._jobs[trial.file_stem] = _Job(trial, runner, alone, handle)
        self._note()

    def events(self, seconds: float) -> Iterable[Event]:
        ask = time.monotonic() - self._asked > ASK
        if ask:
            self._asked = time.monotonic()
        found = [event for job in list(self._jobs.values()) for event in self._news(job, ask)]
        if not found:
            time.sleep(seconds)
        return found

    def _submit(self, runner: Runner, trial: Trial, alone: bool) -> submitit.Job:
        threads = None if alone else self._options.cpus_per_trial
        place = Place(alone=alone, variables=thread_variables(threads))
        sweep = None if self._cluster == "slurm" else os.getpid()
        task = _Task(runner, trial, place, sweep)
        with _importable():
            try:
                return self._executor(alone, trial.label).submit(task)
            except submitit.core.utils.FailedJobError as error:  # sbatch refuses
                raise EngineError(f"--engine slurm: {error}") from None

    def _executor(self, alone: bool, name: str = "trial") -> submitit.AutoExecutor:
        """An executor for one job.  Raises `EngineError` for a parameter that is wrong."""
        wanted = {"timeout_min": MINUTES, "name": f"ampatch {name}", **self._parameters}
        if alone:
            wanted["exclusive"] = True
            if self._node is not None:
                wanted["nodelist"] = self._node
        try:
            executor = submitit.AutoExecutor(
                self._folder, cluster=self._cluster, slurm_max_num_timeout=0
            )
            executor.update_parameters(
                **{key if key in _GENERAL else f"slurm_{key}": wanted[key] for key in wanted}
            )
        except RuntimeError as error:
            raise EngineError(
                f"--engine slurm: {error} Expected a machine with sbatch; --slurm cluster=local "
                "runs the jobs on this machine."
            ) from None
        except (AssertionError, NameError, ValueError) as error:
            given = ", ".join(f"{key}={value}" for key, value in self._options.slurm.items())
            raise EngineError(f"--slurm {given}: {error}") from None
        return executor

    def _news(self, job: _Job, ask: bool) -> list[Event]:
        ended = job.handle.done(force_check=ask)
        news = self._progress(job)
        if ended:
            outcome = self._outcome(job)
            news += [] if outcome is None else [outcome]
        return news

    def _progress(self, job: _Job) -> list[Event]:
        reached = reached_in(RunFiles.of(job.runner.directory, job.trial))
        news: list[Event] = []
        if reached is not None and not job.started:
            job.started = True
            news.append(Started(job.trial))
        if reached is not None and reached != job.reached:
            job.reached = reached
            news.append(Reached(job.trial, reached))
        return news

    def _outcome(self, job: _Job) -> Event | None:
        """What became of a job that has ended; None if it is submitted again."""
        handle = job.handle
        try:
            if self._cluster != "slurm" and not handle.paths.result_pickle.exists():
                raise UncompletedJobError  # no file system that could show it later
            result = handle.result()
        except FailedJobError as error:
            return self._close(job, Failed(job.trial, EngineError(f"--engine slurm: {error}")))
        except UncompletedJobError:
            state = job.handle.state
            if job.attempts > RETRIES or state.startswith(_FINAL):
                return self._close(job, Lost(job.trial, f"state {state}"))
            job.handle = self._submit(job.runner, job.trial, job.alone)
            job.attempts += 1
            self._note()
            return None
        if not isinstance(result, Run):
            return self._close(job, Failed(job.trial, result))
        if job.alone and self._node is None and self._cluster == "slurm":
            self._node = result.host
        return self._close(job, Ended(result))

    def _close(self, job: _Job, event: Event) -> Event:
        del self._jobs[job.trial.file_stem]
        self._note()
        return event

    def _note(self) -> None:
        """Keep the numbers of the jobs, for a sweep that goes on after this process."""
        numbers = {stem: job.handle.job_id for stem, job in self._jobs.items()}
        self._folder.mkdir(exist_ok=True)
        write_json(self._noted, {"node": self._node, "jobs": {**self._earlier, **numbers}})


@dataclass(frozen=True)
class _Task:
    """What a job does.  `sweep` is the process to end with, for jobs of this machine."""

    runner: Runner
    trial: Trial
    place: Place
    sweep: int | None

    def __call__(self) -> Run | Exception:
        signal.signal(signal.SIGTERM, _end)
        watch = Watch()
        if self.sweep is not None:
            threading.Thread(target=_cancel_after, args=(self.sweep, watch), daemon=True).start()
        try:
            return self.runner.run(self.trial, watch, self.place)
        except (Cancelled, OSError, ValueError) as error:
            return error

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Asked by submitit when the job is preempted: it begins again."""
        return submitit.helpers.DelayedSubmission(self)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _cancel_after(process: int, watch: Watch) -> None:
    """Cancel the trial when the process has ended."""
    while True:
        time.sleep(1.0)
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            watch.cancel()
            return


def _asked(options: SweepOptions) -> dict[str, Any]:
    """The parameters that --gpus-per-trial, --cpus-per-trial and --timeout stand for."""
    asked = {"gpus_per_node": options.gpus_per_trial, "cpus_per_task": options.cpus_per_trial}
    return {name: math.ceil(value) for name, value in asked.items() if value is not None}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C here: commands that end jobs run to their end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Jobs inherit this process's variables, but not its `sys.path`."""
    before = os.environ.get("PYTHONPATH")
    path = python_path(os.environ)
    if path is not None:
        os.environ["PYTHONPATH"] = path
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
