"""What the watcher of a trial tells, and how it is asked to end the trial."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ampatch.sweep.kinds import UNKNOWN, Kind


@dataclass(frozen=True)
class Reach:
    """How far a trial has come: optimizer steps, the latest loss, and the kind of its script."""

    steps: int
    loss: float | None = None
    kind: Kind = UNKNOWN


class Cancelled(Exception):
    """The trial was ended because nobody wants its result any more."""


class Watch:
    """Handed to `Runner.run`: `reached(reach)` hears of progress; the rest ends the trial.

    `cancelled` lets the script end by itself within a time of grace, `killed` does not; both
    may be set from another thread.
    """

    def __init__(self, reached: Callable[[Reach], None]) -> None:
        self._reached = reached
        self._last: Reach | None = None
        self.cancelled, self.killed = threading.Event(), threading.Event()

    def reached(self, reach: Reach) -> None:
        """Pass progress on, where there is any."""
        if reach != self._last:
            self._last = reach
            self._reached(reach)

    def check(self) -> None:
        """Raise `Cancelled` if the trial was cancelled."""
        if self.cancelled.is_set():
            raise Cancelled
