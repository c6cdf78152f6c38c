"""An estimate of the time left in a sweep, from the runs that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SHARE = 0.05  # of a run: before that, most of its time was its start


class TimeLeft:
    """Counts the runs that start and end.  `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: list[float] = []
        self._began: dict[object, float] = {}  # of the runs that go on, by their name
        self._waiting = 0  # runs that have not started

    def started(self, number: int, count: int, name: object = None) -> None:
        """The run `name` starts, as the one with this `number` (from 1) of `count`."""
        self._began[name] = self._clock()
        self._waiting = count - number

    def ended(self, name: object = None) -> None:
        self._ended.append(self._clock() - self._began.pop(name))

    def seconds(self, share: float | None = None, name: object = None) -> float | None:
        """Seconds for all remaining runs; None while nothing is known.

        `share` is the finished part of the run `name`, 0 to 1, if known.  Runs that go on
        beside each other share what remains.
        """
        now = self._clock()
        if self._ended:
            each = sum(self._ended) / len(self._ended)
        elif share is not None and share >= LEAST_SHARE:
            each = (now - self._began[name]) / share
        else:
            return None
        going_on = sum(max(0.0, each - (now - began)) for began in self._began.values())
        return (going_on + each * self._waiting) / max(1, len(self._began))

    def text(self, share: float | None = None, name: object = None) -> str:
        """`1:05 left`, `2:00:10 left`, or "" while nothing is known."""
        seconds = self.seconds(share, name)
        if seconds is None:
            return ""
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return (f"{hours}:{minutes:02}" if hours else f"{minutes}") + f":{rest:02} left"
