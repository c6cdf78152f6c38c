"""An estimate of the time left in a sweep, from the runs that have ended.

Whole and short runs are estimated apart.  Of a kind that has not run yet, a run is taken to
last as long as one of the other, a short one at most `SHORT`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SHARE = 0.05  # of a run: before that, most of its time was its start
SHORT = 10.0  # seconds


class TimeLeft:
    """Counts the runs that start and end.  `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[bool, list[float]] = {False: [], True: []}  # by "is short"
        self._began = 0.0
        self._is_short = False
        self._later = {False: 0, True: 0}  # runs after the present one

    def started(
        self, number: int, count: int, is_short: bool = False, short_later: int = 0
    ) -> None:
        """Run `number` of `count` starts; `short_later` of those after it are short."""
        self._began = self._clock()
        self._is_short = is_short
        self._later = {False: count - number - short_later, True: short_later}

    def ended(self) -> None:
        self._ended[self._is_short].append(self._clock() - self._began)

    def seconds(self, share: float | None = None) -> float | None:
        """Seconds for all remaining runs; None while nothing is known.

        `share` is the finished part of the present run, 0 to 1, if known.
        """
        spent = self._clock() - self._began
        if not any(self._ended.values()):
            if share is None or share < LEAST_SHARE:
                return None
            each = self._each({self._is_short: spent / share})
        else:
            each = self._each({kind: sum(s) / len(s) for kind, s in self._ended.items() if s})
        present = max(0.0, each[self._is_short] - spent)
        return present + sum(each[kind] * count for kind, count in self._later.items())

    def text(self, share: float | None = None) -> str:
        """`1:05 left`, `2:00:10 left`, or "" while nothing is known."""
        seconds = self.seconds(share)
        if seconds is None:
            return ""
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return (f"{hours}:{minutes:02}" if hours else f"{minutes}") + f":{rest:02} left"

    def _each(self, known: dict[bool, float]) -> dict[bool, float]:
        """The seconds of a run of each kind, where at least one kind is known."""
        other = next(iter(known.values()))
        return {False: known.get(False, other), True: known.get(True, min(other, SHORT))}
