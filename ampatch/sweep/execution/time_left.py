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
        self._began = 0.0
        self._to_come = 0  # runs, the present one included

    def started(self, number: int, count: int) -> None:
        self._began = self._clock()
        self._to_come = count - number + 1

    def ended(self) -> None:
        self._ended.append(self._clock() - self._began)
        self._to_come -= 1

    def seconds(self, share: float | None = None) -> float | None:
        """Seconds for all remaining runs; None while nothing is known.

        `share` is the finished part of the present run, 0 to 1, if known.
        """
        spent = self._clock() - self._began
        if self._ended:
            each = sum(self._ended) / len(self._ended)
        elif share is not None and share >= LEAST_SHARE:
            each = spent / share
        else:
            return None
        return max(0.0, each - spent) + each * (self._to_come - 1)

    def text(self, share: float | None = None) -> str:
        """`1:05 left`, `2:00:10 left`, or "" while nothing is known."""
        seconds = self.seconds(share)
        if seconds is None:
            return ""
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return (f"{hours}:{minutes:02}" if hours else f"{minutes}") + f":{rest:02} left"
