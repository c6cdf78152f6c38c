"""What the watcher of a trial tells, and how it is asked to end the trial."""

from __future__ import annotations

import threading
from collections.abc import Callable

Reached = Callable[[int, "float | None"], None]


class Cancelled(Exception):
    """The trial was ended because nobody wants its result any more."""


class Watch:
    """Handed to `Runner.run`: `reached(steps, loss)` hears of progress; the rest ends the trial.

    `cancel` lets the script end by itself within a time of grace, `kill` does not; both
    may be called from another thread.
    """

    def __init__(self, reached: Reached | None = None) -> None:
        self._reached = reached
        self._last: tuple[int, float | None] | None = None
        self._cancelled = threading.Event()
        self.killed = threading.Event()

    def reached(self, steps: int, loss: float | None) -> None:
        """Pass progress on, where there is any."""
        if self._reached is not None and (steps, loss) != self._last:
            self._last = steps, loss
            self._reached(steps, loss)

    def cancel(self) -> None:
        self._cancelled.set()

    def kill(self) -> None:
        self._cancelled.set()
        self.killed.set()

    def check(self) -> None:
        """Raise `Cancelled` if the trial was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled
