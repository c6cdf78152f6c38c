"""The verdict on speed: which rows this machine tells apart from O0.

The rule is in docs/explanation/sweep_figures.md, "Speed".  O0's own speed is that of its second run
in each round over its first, its reach the factor by which that departs from 1.00, either way.
Where O0 ran once in each round, its speed is that from round to round.  One round tells nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweep.report.figures import spread_of
from ampatch.sweep.report.numbers import ratio
from ampatch.sweep.report.results import Row, Spread

NOISE = 0.05
WORTHWHILE = 1.05  # a speed-up below this is none
FASTER, SLOWER, UNKNOWN, ONE_ROUND = "faster", "slower", "not told apart", "one round"


def reach_of(ratios: Sequence[float]) -> float | None:
    """The factor by which O0's speed departs from 1.00, by its ratios over the rounds."""
    spread = spread_of(ratios)
    if spread is None:
        return None
    is_quiet = 1 / (1 + NOISE) <= spread.median <= 1 + NOISE
    low, high = (spread.low, spread.high) if is_quiet else (min(ratios), max(ratios))
    return max(high, 1 / low, 1.0)


def pace_of(
    speeds: Spread | None,
    reach: float | None,
    cpu_speeds: Spread | None = None,
    cpu_reach: float | None = None,
) -> tuple[str, bool]:
    """The verdict on a row's `speeds` where O0's has this `reach`, and whether CPU time decided."""
    pace = _told(speeds, reach)
    if speeds and reach and pace == UNKNOWN and max(reach, speeds.high / speeds.low) > 1 + NOISE:
        by_cpu = _told(cpu_speeds, cpu_reach)
        if by_cpu in (FASTER, SLOWER):
            return by_cpu, True
    return pace, False


def _told(speeds: Spread | None, reach: float | None) -> str:
    if speeds is None:
        return ""
    if speeds.n < 2:
        return ONE_ROUND
    return FASTER if speeds.low > reach else SLOWER if speeds.high < 1 / reach else UNKNOWN


def told_apart(faster: Row, other: Row) -> bool:
    """Whether one row is surely faster than another, as `pace_of` says it beside O0."""
    if faster.by_cpu or other.by_cpu:
        one, two, reach = faster.cpu_speeds, other.cpu_speeds, faster.cpu_reach
    else:
        one, two, reach = faster.speeds, other.speeds, faster.reach
    return None not in (one, two, reach) and one.low > two.high * reach


def in_words(row: Row) -> str:
    """A row's speed, for its verdict; "" where it was not compared."""
    if row.speeds is None or row.outcome == "failed":
        return ""
    if row.outcome == "baseline":
        return f"its second run was {_ratio(row.speeds, 'times as fast as its first')}"
    if row.pace == UNKNOWN:
        why = "the rounds do not agree"
        if row.reach and not row.speeds.low <= 1 <= row.speeds.high:
            why = f"O0 beside itself differed by a factor of {ratio(row.reach)}"
        return f"{_ratio(row.speeds, 'times as fast as O0')}, which may be noise: {why}"
    said = _ratio(row.decisive, "times as fast as O0")
    if row.by_cpu:
        return f"{said} by CPU time (wall time is too noisy: {_ratio(row.speeds)})"
    return said + ", in one round, which is too few to tell" * (row.pace == ONE_ROUND)


def worthwhile(rows: Sequence[Row]) -> list[Row]:
    """The rows that are fast enough to train with them."""
    return [row for row in rows if row.pace == FASTER and row.decisive.median >= WORTHWHILE]


def surely_not(row: Row) -> bool:
    """Whether it is told that a row is not faster by enough."""
    return row.pace == SLOWER or (row.pace == FASTER and not worthwhile([row]))


def none_recommended(rows: Sequence[Row], base: Row) -> str:
    """Why none of these rows is recommended for its speed."""
    if not any(row.pace for row in rows):
        return "Stay with O0: how fast the other rows are was not measured."
    if any(row.pace == ONE_ROUND for row in rows):
        return "Not known yet: a speed takes two rounds or more. --resume --rounds 3 adds them."
    rounds = base.speeds.n if base.speeds else 0
    unknown = [row.name for row in rows if row.pace == UNKNOWN]
    if unknown:
        return (
            f"Stay with O0: no row with its accuracy is surely {WORTHWHILE:g} times as fast; not "
            f"told apart: {', '.join(unknown)}, as O0 beside itself was {_ratio(base.speeds)}. "
            "When the machine is idle, measure anew (--overwrite), or add rounds: --resume "
            f"--rounds {rounds + 3}."
        )
    fastest = max(filter(surely_not, rows), key=lambda row: row.decisive.median)
    return (
        f"Stay with O0: no row is {WORTHWHILE:g} times as fast. The fastest, {fastest.name}, is "
        f"{in_words(fastest)}."
    )


def _ratio(speeds: Spread | None, of: str = "") -> str:
    """`1.57 times as fast as O0 (1.47 to 1.77)`, with the quartiles over the rounds."""
    assert speeds is not None
    words = f"{ratio(speeds.median)} {of}".rstrip()
    return words if speeds.n < 2 else f"{words} ({ratio(speeds.low)} to {ratio(speeds.high)})"
