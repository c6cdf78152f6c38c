"""The verdict on speed: which rows are faster or slower than O0 by more than the noise.

The rule is in docs/explanation/sweep_figures.md, "Speed".  The noise is measured with O0.  O0 runs
twice in each round, and the speed of the second run relative to the first should be 1.00.  The
noise is called the reach of O0: the largest factor by which these speeds lie above or below 1.00.
If their median is near 1.00, the outer quartiles do not count.  If O0 ran only once in
each of at least three rounds, the runs of successive rounds are compared instead.

In simulations with noise of 2 to 30 % this rule wrongly reports a speed-up in 2 % of sweeps;
with only two rounds, in 10 %.  A single round gives no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweep.report.numbers import ratio
from ampatch.sweep.report.results import Row, Spread
from ampatch.sweep.report.run_figures import spread_of

NOISE = 0.05  # relative difference of speeds that counts as noise
MIN_SPEEDUP = 1.05  # the smallest speed-up for which a row is recommended
FASTER, SLOWER, UNCLEAR, FEW_ROUNDS = "faster", "slower", "not told apart", "too few rounds"


def reach_of(ratios: Sequence[float]) -> float | None:
    """O0's reach, from the speed ratios of its two runs in each round; None without a ratio."""
    spread = spread_of(ratios)
    if spread is None:
        return None
    is_quiet = 1 / (1 + NOISE) <= spread.median <= 1 + NOISE
    low, high = (spread.low, spread.high) if is_quiet else (min(ratios), max(ratios))
    return max(high, 1 / low, 1.0)


def pace_of(
    speeds: Spread | None, reach: float | None, cpu_speeds: Spread | None = None,
    cpu_reach: float | None = None,
) -> tuple[str, bool]:  # fmt: skip
    """The verdict on a row's `speeds` with O0's `reach`, and whether CPU time decided.

    CPU time decides if wall time is too noisy for a verdict.
    """
    pace = _verdict(speeds, reach)
    if speeds and reach and pace == UNCLEAR and max(reach, speeds.high / speeds.low) > 1 + NOISE:
        cpu_pace = _verdict(cpu_speeds, cpu_reach)
        if cpu_pace in (FASTER, SLOWER):
            return cpu_pace, True
    return pace, False


def _verdict(speeds: Spread | None, reach: float | None) -> str:
    if speeds is None:
        return ""
    if speeds.n < 2 or reach is None:
        return FEW_ROUNDS
    return FASTER if speeds.low > reach else SLOWER if speeds.high < 1 / reach else UNCLEAR


def is_surely_faster(faster: Row, other: Row) -> bool:
    """Whether one row is faster than another by more than the noise."""
    if faster.by_cpu or other.by_cpu:
        speeds, other_speeds, reach = faster.cpu_speeds, other.cpu_speeds, faster.cpu_reach
    else:
        speeds, other_speeds, reach = faster.speeds, other.speeds, faster.reach
    return None not in (speeds, other_speeds, reach) and speeds.low > other_speeds.high * reach


def speed_text(row: Row) -> str:
    """A row's speed as text, for its verdict; "" if it was not compared."""
    if row.speeds is None or row.outcome == "failed":
        return ""
    if row.outcome == "baseline":
        return f"the second of its two runs was {ratio_text(row.speeds, 'times as fast')}"
    if row.pace == UNCLEAR:
        reason = "the rounds do not agree"
        if row.reach and not row.speeds.low <= 1 <= row.speeds.high:
            reason = f"runs of O0 itself differed by a factor of {ratio(row.reach)}"
        return f"{ratio_text(row.speeds, 'times as fast as O0')}, which may be noise: {reason}"
    text = ratio_text(row.decisive, "times as fast as O0")
    if row.by_cpu:
        return f"{text} by CPU time (wall time is too noisy: {ratio_text(row.speeds)})"
    return f"{text}, in too few rounds to tell" if row.pace == FEW_ROUNDS else text


def worthwhile_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that are faster than O0 by enough to be recommended."""
    return [row for row in rows if row.pace == FASTER and row.decisive.median >= MIN_SPEEDUP]


def may_be_worthwhile(row: Row) -> bool:
    """Whether a row is neither surely slower than O0 nor faster by too little."""
    return bool(worthwhile_rows([row])) or row.pace not in (SLOWER, FASTER)


def ratio_text(speeds: Spread | None, unit: str = "") -> str:
    """`1.57 times as fast as O0 (1.47 to 1.77)`, with the quartiles over the rounds."""
    assert speeds is not None
    text = f"{ratio(speeds.median)} {unit}".rstrip()
    return text if speeds.n < 2 else f"{text} ({ratio(speeds.low)} to {ratio(speeds.high)})"
