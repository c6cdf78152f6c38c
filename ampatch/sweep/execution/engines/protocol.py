"""The interface of engines, which run the trials of a sweep, and the events that they report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ampatch.sweep.execution.runner import Runner, TrialProgress
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.trial import Trial


@dataclass(frozen=True)
class Started:
    """The trial has begun to run."""

    trial: Trial


@dataclass(frozen=True)
class Progressed:
    """The trial has new progress."""

    trial: Trial
    progress: TrialProgress


@dataclass(frozen=True)
class Ended:
    """The trial's process has ended, also with an error; the files are in the sweep's directory."""

    run: Run


@dataclass(frozen=True)
class Lost:
    """The worker died in every attempt, so there is no run."""

    trial: Trial
    reason: str


@dataclass(frozen=True)
class Failed:
    """The trial could not be run, because a file is missing or a disk is full, for example."""

    trial: Trial
    error: BaseException


Event = Started | Progressed | Ended | Lost | Failed


class EngineError(RuntimeError):
    """The engine cannot run trials, because there is no cluster or the cluster lacks resources."""


class Engine(Protocol):
    """Runs trials.  Used by one thread, as a context manager.

    Leaving the block ends all submitted trials that still run, also after a second Ctrl-C.  A
    resumed sweep submits the trials that have no run.
    """

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exception: object) -> None: ...

    def has_room(self) -> bool:
        """Whether one more trial that runs beside others may be submitted."""

    def submit(self, runner: Runner, trial: Trial, alone: bool) -> None:
        """Run the trial by `runner`.  With `alone`, no other trial uses the same devices or node.

        A trial with `alone` is submitted when no other is running; they all run on the same node.
        """

    def events(self, seconds: float) -> Iterable[Event]:
        """The events since the last call; waits up to this number of seconds for an event."""
