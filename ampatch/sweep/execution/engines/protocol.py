"""What a sweep asks of the engine that runs its trials, and the events that it gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ampatch.sweep.execution.runner import Runner, TrialProgress
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.trial import Trial


@dataclass(frozen=True)
class Started:
    """The trial runs now."""

    trial: Trial


@dataclass(frozen=True)
class Progressed:
    """How far the trial has come."""

    trial: Trial
    progress: TrialProgress


@dataclass(frozen=True)
class Ended:
    """The trial's process has ended, well or not; its files are in the sweep's directory."""

    run: Run


@dataclass(frozen=True)
class Lost:
    """The worker died in every attempt, so there is no run."""

    trial: Trial
    reason: str


@dataclass(frozen=True)
class Failed:
    """The trial could not be run at all: a file is missing, a disk is full."""

    trial: Trial
    error: BaseException


Event = Started | Progressed | Ended | Lost | Failed


class EngineError(RuntimeError):
    """The engine cannot run trials: no cluster, no such resources."""


class Engine(Protocol):
    """Runs trials somewhere.  Used by one thread, as a context manager.

    Leaving the block ends everything that was submitted and has not ended, also after a
    second Ctrl-C.  A sweep that is resumed submits the trials that have no run.
    """

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exception: object) -> None: ...

    def has_room(self) -> bool:
        """Whether one more trial may be submitted, to run beside others."""

    def submit(self, runner: Runner, trial: Trial, alone: bool) -> None:
        """Have `runner` run the trial.  With `alone` it has its devices, or a node, for itself.

        Such a trial is submitted when no other is running.  All of them run on one node.
        """

    def events(self, seconds: float) -> Iterable[Event]:
        """The events since the last call; waits up to this number of seconds for one."""
