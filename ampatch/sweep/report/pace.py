"""The verdict on speed: which rows this machine tells apart from O0.

The rule is in docs/explanation/sweep_figures.md, "Speed".  O0's own speed is that of its second run
in each round over its first, its reach the factor by which that departs from 1.00, either way.
Where O0 ran once in each of three rounds or more, its speed is that from round to round: with rows
as fast as O0 that calls one of them faster in 2 % of sweeps, with two rounds in 10 % (simulated,
noise of 2 to 30 %).  One round tells nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweep.report.figures import spread_of
from ampatch.sweep.report.numbers import ratio
from ampatch.sweep.report.results import Row, Spread

NOISE = 0.05
WORTHWHILE = 1.05  # a speed-up below this is none
FASTER, SLOWER, UNKNOWN, FEW_ROUNDS = "faster", "slower", "not told apart", "too few rounds"


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
    if speeds.n < 2 or reach is None:
        return FEW_ROUNDS
    return FASTER if speeds.low > reach else SLOWER if speeds.high < 1 / reach else UNKNOWN


def told_apart(faster: Row, other: Row) -> bool:
    """Whether one row is surely faster than another, as `pace_of` says it beside O0."""
    if faster.by_cpu or other.by_cpu:
        ours, two, reach = faster.cpu_speeds, other.cpu_speeds, faster.cpu_reach
    else:
        ours, two, reach = faster.speeds, other.speeds, faster.reach
    return None not in (ours, two, reach) and ours.low > two.high * reach


def in_words(row: Row) -> str:
    """A row's speed, for its verdict; "" where it was not compared."""
    if row.speeds is None or row.outcome == "failed":
        return ""
    if row.outcome == "baseline":
        return f"run twice, its second run was {ratio_text(row.speeds, 'times as fast')}"
    if row.pace == UNKNOWN:
        why = "the rounds do not agree"
        if row.reach and not row.speeds.low <= 1 <= row.speeds.high:
            why = f"runs of O0 itself differed by a factor of {ratio(row.reach)}"
        return f"{ratio_text(row.speeds, 'times as fast as O0')}, which may be noise: {why}"
    said = ratio_text(row.decisive, "times as fast as O0")
    if row.by_cpu:
        return f"{said} by CPU time (wall time is too noisy: {ratio_text(row.speeds)})"
    return said + ", in too few rounds to tell" * (row.pace == FEW_ROUNDS)


def worthwhile(rows: Sequence[Row]) -> list[Row]:
    """The rows that are fast enough to train with them."""
    return [row for row in rows if row.pace == FASTER and row.decisive.median >= WORTHWHILE]


def surely_not(row: Row) -> bool:
    """Whether it is told that a row is not faster by enough."""
    return row.pace == SLOWER or (row.pace == FASTER and not worthwhile([row]))


def ratio_text(speeds: Spread | None, of: str = "") -> str:
    """`1.57 times as fast as O0 (1.47 to 1.77)`, with the quartiles over the rounds."""
    assert speeds is not None
    words = f"{ratio(speeds.median)} {of}".rstrip()
    return words if speeds.n < 2 else f"{words} ({ratio(speeds.low)} to {ratio(speeds.high)})"
