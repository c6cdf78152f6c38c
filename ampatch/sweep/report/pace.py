"""The verdict on speed: which rows are faster or slower than O0 by more than the noise.

The rule is in docs/explanation/sweep_figures.md, "Speed".  The noise is measured with O0 itself.
In each round O0 runs twice, and the speed of its second run relative to the first should be 1.00.
The reach of O0 is the factor by which these speeds depart from 1.00, up or down.  If O0 ran only
once in a round, but in three rounds or more, each round's run is compared with the next one's.
By this rule a row as fast as O0 is called faster in 2 % of sweeps, with two rounds in 10 %
(simulated, noise of 2 to 30 %).  One round shows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweep.report.numbers import ratio
from ampatch.sweep.report.results import Row, Spread
from ampatch.sweep.report.run_figures import spread_of

NOISE = 0.05
WORTHWHILE = 1.05  # the smallest speed-up for which a row is recommended
FASTER, SLOWER, UNKNOWN, FEW_ROUNDS = "faster", "slower", "not told apart", "too few rounds"


def reach_of(ratios: Sequence[float]) -> float | None:
    """O0's reach, from the ratios of its two runs in each round; None without a ratio."""
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
    """The verdict on a row's `speeds` with O0's `reach`, and whether CPU time decided."""
    pace = _verdict(speeds, reach)
    if speeds and reach and pace == UNKNOWN and max(reach, speeds.high / speeds.low) > 1 + NOISE:
        by_cpu = _verdict(cpu_speeds, cpu_reach)
        if by_cpu in (FASTER, SLOWER):
            return by_cpu, True
    return pace, False


def _verdict(speeds: Spread | None, reach: float | None) -> str:
    if speeds is None:
        return ""
    if speeds.n < 2 or reach is None:
        return FEW_ROUNDS
    return FASTER if speeds.low > reach else SLOWER if speeds.high < 1 / reach else UNKNOWN


def is_surely_faster(faster: Row, other: Row) -> bool:
    """Whether one row is faster than another by more than the noise."""
    if faster.by_cpu or other.by_cpu:
        ours, theirs, reach = faster.cpu_speeds, other.cpu_speeds, faster.cpu_reach
    else:
        ours, theirs, reach = faster.speeds, other.speeds, faster.reach
    return None not in (ours, theirs, reach) and ours.low > theirs.high * reach


def speed_text(row: Row) -> str:
    """A row's speed as text, for its verdict; "" if it was not compared."""
    if row.speeds is None or row.outcome == "failed":
        return ""
    if row.outcome == "baseline":
        return f"run twice, its second run was {ratio_text(row.speeds, 'times as fast')}"
    if row.pace == UNKNOWN:
        reason = "the rounds do not agree"
        if row.reach and not row.speeds.low <= 1 <= row.speeds.high:
            reason = f"runs of O0 itself differed by a factor of {ratio(row.reach)}"
        return f"{ratio_text(row.speeds, 'times as fast as O0')}, which may be noise: {reason}"
    text = ratio_text(row.decisive, "times as fast as O0")
    if row.by_cpu:
        return f"{text} by CPU time (wall time is too noisy: {ratio_text(row.speeds)})"
    return text + ", in too few rounds to tell" * (row.pace == FEW_ROUNDS)


def worthwhile(rows: Sequence[Row]) -> list[Row]:
    """The rows that are faster than O0 by enough to be recommended."""
    return [row for row in rows if row.pace == FASTER and row.decisive.median >= WORTHWHILE]


def is_not_worthwhile(row: Row) -> bool:
    """Whether a row is surely slower than O0, or faster by too little."""
    return row.pace == SLOWER or (row.pace == FASTER and not worthwhile([row]))


def ratio_text(speeds: Spread | None, of: str = "") -> str:
    """`1.57 times as fast as O0 (1.47 to 1.77)`, with the quartiles over the rounds."""
    assert speeds is not None
    words = f"{ratio(speeds.median)} {of}".rstrip()
    return words if speeds.n < 2 else f"{words} ({ratio(speeds.low)} to {ratio(speeds.high)})"
