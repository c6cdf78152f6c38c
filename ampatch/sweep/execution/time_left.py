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
        self._going: dict[object, tuple[float, bool]] = {}  # by name: when it began, is it short
        self._later = {False: 0, True: 0}  # runs that have not started

    def started(
        self,
        number: int,
        count: int,
        is_short: bool = False,
        short_later: int = 0,
        name: object = None,
    ) -> None:
        """The run `name` starts, as number `number` of `count`.

        Of those after it `short_later` are short.
        """
        self._going[name] = self._clock(), is_short
        self._later = {False: count - number - short_later, True: short_later}

    def ended(self, name: object = None) -> None:
        began, is_short = self._going.pop(name)
        self._ended[is_short].append(self._clock() - began)

    def seconds(self, share: float | None = None, name: object = None) -> float | None:
        """Seconds for all remaining runs; None while nothing is known.

        `share` is the finished part of the run `name`, 0 to 1, if known.  As many whole runs
        are taken to go on beside each other as do now; short ones run alone.
        """
        now = self._clock()
        if any(self._ended.values()):
            each = self._each({kind: sum(s) / len(s) for kind, s in self._ended.items() if s})
        elif share is not None and share >= LEAST_SHARE:
            began, is_short = self._going[name]
            each = self._each({is_short: (now - began) / share})
        else:
            return None
        present = sum(
            max(0.0, each[is_short] - (now - began)) for began, is_short in self._going.values()
        )
        beside = (present + each[False] * self._later[False]) / max(1, len(self._going))
        return beside + each[True] * self._later[True]

    def text(self, share: float | None = None, name: object = None) -> str:
        """`1:05 left`, `2:00:10 left`, or "" while nothing is known."""
        seconds = self.seconds(share, name)
        if seconds is None:
            return ""
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return (f"{hours}:{minutes:02}" if hours else f"{minutes}") + f":{rest:02} left"

    def _each(self, known: dict[bool, float]) -> dict[bool, float]:
        """The seconds of a run of each kind, where at least one kind is known."""
        other = next(iter(known.values()))
        return {False: known.get(False, other), True: known.get(True, min(other, SHORT))}
