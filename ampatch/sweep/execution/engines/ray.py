"""The engine of a Ray cluster: each trial is a task, and Ray repeats it if the worker dies.

Workers write temporary files only.  The run and its log are the result of the task.  Progress comes
through the actor `_EventQueue`.  A trial that runs alone has a placement group of a whole node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ampatch.config.environment import PROCESS_VARIABLES
from ampatch.launch.program import Program
from ampatch.sweep.execution.directory import RunFiles
from ampatch.sweep.execution.engines.protocol import (
    Ended,
    EngineError,
    Event,
    Failed,
    Lost,
    Progressed,
    Started,
)
from ampatch.sweep.execution.placement import THREADS, Placement
from ampatch.sweep.execution.runner import Runner, TrialControl
from ampatch.sweep.json_files import write_json
from ampatch.sweep.measure.machine import versions
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.trial import Trial

RETRIES = 3  # for a trial whose worker has died
CANCEL_SECONDS = 15.0  # from the interrupt of a task to the end of its worker
_PASSED_VARIABLES = (THREADS, "MKL_NUM_THREADS", "PYTHONHASHSEED", *PROCESS_VARIABLES)


class RayEngine:
    """Connects to a cluster, or starts Ray on this machine, while its block runs."""

    def __init__(self, options: SweepOptions) -> None:
        self._options = options
        self._running: dict[Any, tuple[Runner, Trial]] = {}  # by the reference of the task
        self._started: set[Trial] = set()
        self._timed_group: Any = None
        self._has_connected = False  # whether this engine called ray.init

    def __enter__(self) -> RayEngine:
        if not ray.is_initialized():
            _connect(self._options.address)
            self._has_connected = True
        try:
            self._resources = _resources_of_trial(self._options)
            self._queue = ray.remote(num_cpus=0, max_restarts=-1)(_EventQueue).remote()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._cancel()
        finally:
            if self._timed_group is not None:
                remove_placement_group(self._timed_group)
            if self._has_connected:
                ray.shutdown()

    def has_room(self) -> bool:
        return self._options.jobs is None or len(self._running) < self._options.jobs

    def submit(self, runner: Runner, trial: Trial, alone: bool) -> None:
        resources = self._resources
        options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        if alone:
            options["num_cpus"] = resources.node_cpus
            self._timed_group = self._timed_group or placement_group([resources.bundle])
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._timed_group)
        task = ray.remote(_run).options(max_retries=RETRIES, name=trial.label, **options)
        variables = _variables(None if alone else resources.threads)
        placement = Placement(alone=alone, variables=variables)
        portable = dataclasses.replace(runner, directory=Path())
        reference = task.remote(
            portable, trial, placement, self._queue, os.getcwd(), _shared_versions()
        )
        self._running[reference] = runner, trial

    def events(self, seconds: float) -> Iterable[Event]:
        ready, _ = ray.wait(list(self._running), timeout=seconds)
        events = self._new_events()
        for reference in ready:
            runner, trial = self._running.pop(reference)
            if trial not in self._started:
                events.append(Started(trial))
            events.append(_final_event(reference, runner, trial))
        return events

    def _new_events(self) -> list[Event]:
        """New events of running trials.  A retried trial does not start again."""
        try:
            queued = ray.get(self._queue.take.remote())
        except exceptions.RayActorError:  # the node of the queue has died; Ray starts a new queue
            return []
        running = {trial for _, trial in self._running.values()}
        events = []
        for event in queued:
            if event.trial in running and not (
                isinstance(event, Started) and event.trial in self._started
            ):
                self._started.add(event.trial)
                events.append(event)
        return events

    def _cancel(self) -> None:
        """Interrupt all tasks, and kill their workers after `CANCEL_SECONDS`."""
        running = list(self._running)
        try:
            for reference in running:
                ray.cancel(reference)
            if running:
                ray.wait(running, num_returns=len(running), timeout=CANCEL_SECONDS)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


class _EventQueue:
    """An actor: workers put the events of trials into the queue, and the sweep takes them out."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def put(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


# In the sweep's process


@dataclasses.dataclass(frozen=True)
class _TrialResources:
    """The resources of a trial on the cluster."""

    cpus: float
    gpus: float
    node_cpus: float  # all cores of a largest node, for a trial that runs alone
    threads: int | None

    @property
    def bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.node_cpus, "GPU": self.gpus}
        return {name: amount for name, amount in bundle.items() if amount}


def _connect(address: str | None) -> None:
    """Connect to the cluster at this address, or start Ray on this machine."""
    options: dict[str, Any] = {"address": address}
    if address is None and "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"address": "local", "include_dashboard": False}
    # A trial without GPUs of Ray sees all devices of the machine.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EngineError(
            f"--engine ray: {address or 'Ray on this machine'} cannot be reached or started: "
            f"{error}\nStart a cluster with `ray start --head`, or leave out --address."
        ) from None


def _resources_of_trial(options: SweepOptions) -> _TrialResources:
    """The resources of each trial.  Raises `EngineError` if no node has them."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = options.gpus_per_trial
    if gpus is None:
        gpus = (options.nproc_per_node or 1) if any(node.get("GPU") for node in nodes) else 0
    cores = [node.get("CPU", 0) for node in nodes if node.get("GPU", 0) >= gpus]
    enough_cores = [count for count in cores if count >= (options.cpus_per_trial or 1)]
    if not enough_cores:
        sizes = "; ".join(f"{node.get('CPU', 0):g} and {node.get('GPU', 0):g}" for node in nodes)
        raise EngineError(
            f"--engine ray: a trial asks for {options.cpus_per_trial or 1} cores and {gpus:g} GPUs "
            f"on one node (--cpus-per-trial, --gpus-per-trial). The cluster's nodes have, in cores "
            f"and GPUs: {sizes}."
        )
    cpus = options.cpus_per_trial or (1 if gpus else min(enough_cores))
    return _TrialResources(cpus, gpus, max(enough_cores), options.cpus_per_trial)


def _variables(threads: int | None) -> tuple[tuple[str, str | None], ...]:
    """The variables of the sweep's process that change figures, for trials on any node.

    Ray sets the number of threads in its workers.  A trial instead has `threads`, or the user's
    number, or PyTorch's default.
    """
    passed = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    default = {THREADS: None if threads is None else str(threads)}
    return tuple({**default, **passed}.items())


def _final_event(reference: Any, runner: Runner, trial: Trial) -> Event:
    """The event of a task that has ended; writes the files of its run."""
    try:
        result, log = ray.get(reference)
    except exceptions.RayTaskError as error:  # raised before the runner: a package is missing
        return Failed(trial, EngineError(f"--engine ray: a worker raised {error.cause!r}."))
    except exceptions.RuntimeEnvSetupError as error:
        return Failed(trial, EngineError(f"--engine ray: {error}"))
    except exceptions.RayError as error:
        return Lost(trial, f"{type(error).__name__}, after {RETRIES} retries")
    files = RunFiles.of(runner.directory, trial)
    files.log.write_bytes(log)
    if not isinstance(result, Run):
        return Failed(trial, result)
    write_json(files.run, result.to_json())
    return Ended(result)


def _shared_versions() -> dict[str, str]:
    """The versions that all nodes must share."""
    here = versions()
    return {name: here[name] for name in ("ampatch", "torch")}


# In a worker


def _run(
    runner: Runner, trial: Trial, placement: Placement, queue: Any, directory: str,
    expected: dict[str, str],
) -> tuple[Run | Exception, bytes]:  # fmt: skip
    """Run the trial; returns the run, or an exception for the sweep's process, and the log."""
    if os.path.isdir(directory):  # otherwise Ray has copied the working directory to this node
        os.chdir(directory)
    reason = _reason_unfit(runner.program, expected)
    if reason:
        return EngineError(f"--engine ray: {reason}"), b""
    with contextlib.suppress(exceptions.RayActorError):  # then the result tells that it started
        ray.get(queue.put.remote(Started(trial)))
    control = TrialControl(lambda progress: queue.put.remote(Progressed(trial, progress)))
    with tempfile.TemporaryDirectory(prefix="ampatch-trial-") as folder:
        runner = dataclasses.replace(runner, directory=Path(folder))
        log = RunFiles.of(runner.directory, trial).log
        try:
            return runner.run(trial, control, placement), log.read_bytes()
        except (OSError, ValueError) as error:
            return error, log.read_bytes() if log.exists() else b""


def _reason_unfit(program: Program, expected: dict[str, str]) -> str:
    """Why this node cannot run trials of the sweep; "" if it can."""
    node = socket.gethostname()
    try:
        program.file()
    except (ImportError, OSError):
        return (
            f"node {node} has no {program}. Expected a file system that all nodes share, or a "
            "sweep started by `ray job submit --working-dir`."
        )
    here = _shared_versions()
    if here != expected:
        return f"node {node} has {here}, the sweep's process {expected}. Expected the same."
    return ""
