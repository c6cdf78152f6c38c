"""The verdict on speed: which rows this machine tells apart from O0.

A row's speed is the median over the rounds of O0's step time over the row's, both of the same
round.  O0's own is that of its second run in each round over its first: 1.00 on a machine
without noise.

Nothing is told apart where O0 differs from itself by more than `NOISE` in the median.  Otherwise
a row is faster, or slower, if both quartiles of its speed lie on the same side of 1.00, and
beyond what O0's own quartiles reach, or their reciprocals.  One round tells nothing, nor do
rounds in which O0 ran once.  Of three rounds the quartiles are the least and the greatest, so
each of the three has to agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweep.report.numbers import ratio
from ampatch.sweep.report.results import Row, Spread

NOISE = 0.05
WORTHWHILE = 1.05  # a speed-up below this is none
FASTER, SLOWER, UNKNOWN, ONE_ROUND = "faster", "slower", "not told apart", "one round"
NO_NOISE = "noise not measured"
WHEN_IDLE = "When it is idle, measure anew (--overwrite) or add rounds (--resume --rounds N)."


def pace_of(speeds: Spread | None, noise: Spread | None) -> str:
    """The verdict on a row's `speeds`, where `noise` is O0's own."""
    if speeds is None:
        return ""
    if speeds.n < 2:
        return ONE_ROUND
    if noise is None:
        return NO_NOISE
    reach = _reach(noise)
    if is_noisy(noise) or not (speeds.low > reach or speeds.high < 1 / reach):
        return UNKNOWN
    return FASTER if speeds.low > reach else SLOWER


def told_apart(faster: Row, other: Row, base: Row) -> bool:
    """Whether one row is surely faster than another, as `pace_of` says it beside O0."""
    return faster.speeds.low > other.speeds.high * _reach(base.speeds)


def _reach(noise: Spread) -> float:
    return max(noise.high, 1 / noise.low, 1.0)


def is_noisy(noise: Spread) -> bool:
    """Whether O0 differs from itself by more than `NOISE`."""
    return not 1 / (1 + NOISE) <= noise.median <= 1 + NOISE


def in_words(row: Row) -> str:
    """A row's speed, for its verdict; "" where it was not compared."""
    if row.speeds is None or row.outcome == "failed":
        return ""
    speeds = row.speeds
    if row.outcome == "baseline":
        return f"measured twice, its second run had {_ratio(speeds, 'the speed of the first')}"
    if row.pace == ONE_ROUND:
        return f"{ratio(speeds.median)}x the speed of O0 in one round, which tells nothing"
    if row.pace == NO_NOISE:
        return f"{_ratio(speeds, 'the speed of O0')}, with O0 measured once, which tells nothing"
    if row.pace == UNKNOWN:
        return f"speed not told apart from O0's on this machine: {_ratio(speeds)}"
    return _ratio(speeds, "the speed of O0")


def worthwhile(rows: Sequence[Row]) -> list[Row]:
    """Those rows that are faster, by enough to train with them."""
    return [row for row in rows if row.pace == FASTER and row.speeds.median >= WORTHWHILE]


def none_recommended(rows: Sequence[Row], base: Row) -> str:
    """Why none of these rows is recommended for its speed, as a sentence."""
    if not rows:
        return "Stay with O0: no row that went well is as accurate."
    if not any(row.pace for row in rows):
        return "Stay with O0: the speed of no row that is as accurate was measured."
    if any(row.pace == ONE_ROUND for row in rows) or base.speeds is None:
        return (
            "No speed is recommended: that takes two rounds or more, in which O0 is measured "
            "twice. Use --rounds 3."
        )
    if is_noisy(base.speeds):
        return (
            "No speed is recommended: not told apart on this machine, where O0 against O0 is "
            f"{_ratio(base.speeds)}, off by more than {100 * NOISE:.0f} %. {WHEN_IDLE}"
        )
    unknown = [row.name for row in rows if row.pace == UNKNOWN]
    if unknown:
        return (
            f"Stay with O0: no row with its accuracy is surely {WORTHWHILE:g}x as fast; not told "
            f"apart from it on this machine: {', '.join(unknown)}. {WHEN_IDLE}"
        )
    return f"Stay with O0: no row with its accuracy is at least {WORTHWHILE:g}x as fast."


def _ratio(speeds: Spread, of: str = "") -> str:
    words = f"{ratio(speeds.median)}x {of}".rstrip()
    if speeds.n < 2:
        return f"{words} (one round)"
    return f"{words} ({ratio(speeds.low)} to {ratio(speeds.high)} in {speeds.n} rounds)"
