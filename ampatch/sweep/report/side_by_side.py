"""Two stored sweeps beside each other: two versions of torch, two machines, two settings.

Rows of the same label are compared, B with A, by the tests that compare a row with O0
(`paired.py`): over the seeds that both have, and corrected over the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ampatch.sweep.report.figures import OK, cpu_ms, spread_of
from ampatch.sweep.report.judge import compare, corrected, quality_text
from ampatch.sweep.report.numbers import ratio
from ampatch.sweep.report.pace import FASTER, SLOWER, pace_of
from ampatch.sweep.report.results import Comparison, Row, Spread, Stored
from ampatch.sweep.report.summary import alone, samples_of, seeds_matter


@dataclass(frozen=True)
class RowPair:
    """A row in A and in B; `comparisons` are of B with A, the judged quantity first."""

    first: Row
    second: Row
    comparisons: list[Comparison]
    cpu: Spread | None  # how many times as fast B's steps are by CPU time

    @property
    def speed(self) -> float | None:
        """How many times as fast B's steps are as A's."""
        found = _over(self.first.step_times, self.second.step_times)
        return found and found.median

    @property
    def pace(self) -> str:
        """Whether B is faster, in words; "" where a step time is missing."""
        if self.speed is None:
            return ""
        rows = self.first, self.second
        reach, cpu_reach = (
            None if None in both else max(both)
            for both in ([row.reach for row in rows], [row.cpu_reach for row in rows])
        )
        wall = _over(self.first.step_times, self.second.step_times)
        pace, by_cpu = pace_of(wall, reach, self.cpu, cpu_reach)
        if by_cpu:
            return (
                f"{ratio(self.cpu.median)}x the speed of A by CPU time, as wall time is too noisy: "
                f"{ratio(self.speed)}x"
            )
        if pace in (FASTER, SLOWER):
            return f"{ratio(self.speed)}x the speed of A"
        return f"speed not told apart from A's: {ratio(self.speed)}x"

    @property
    def verdict(self) -> str:
        """What became of the row from A to B, in words."""
        failed = [
            f"in {name} {row.status}"
            for name, row in (("A", self.first), ("B", self.second))
            if row.status != OK
        ]
        if failed:
            return "; ".join(failed)
        quality = quality_text(self.comparisons[0], "A") if self.comparisons else ""
        return "; ".join(filter(None, (self.pace, quality))) or "nothing to compare"


@dataclass(frozen=True)
class SideBySide:
    """Two sweeps, what differs in how they ran, and the rows that both have."""

    first: Stored
    second: Stored
    differences: dict[str, tuple[Any, Any]]
    pairs: list[RowPair]
    alone: dict[str, list[str]] = field(default_factory=dict)  # names of rows, in "A" or "B" only


def side_by_side(first: Stored, second: Stored, judged: str | None = None) -> SideBySide:
    """Compare two sweeps; `judged` is the quantity of the verdicts, by default that of the first.

    Raises `ValueError` if `judged` is a quantity that no row has.
    """
    others = {row.label: row for row in second.results.rows}
    rows = [(row, others[row.label]) for row in first.results.rows if row.label in others]
    stored = [row.comparisons for sweep in (first, second) for row in sweep.results.rows]
    better = {one.name: one.better for ones in reversed(stored) for one in ones}
    wanted = judged or next((ones[0].name for ones in stored if ones), None)
    compared = corrected(
        [
            compare(
                samples_of(second.runs_of(theirs)),
                samples_of(first.runs_of(ours)),
                wanted,
                better,
                seeds_matter(first.runs) and seeds_matter(second.runs),
            )
            for ours, theirs in rows
        ]
    )
    _check_judged(judged, compared)
    return SideBySide(
        first,
        second,
        _differences(first.facts, second.facts),
        [
            RowPair(*pair, ones, _over(*(_cpu_times(*one) for one in zip((first, second), pair))))
            for pair, ones in zip(rows, compared)
        ],
        {"A": _alone(first, second), "B": _alone(second, first)},
    )


def _cpu_times(sweep: Stored, row: Row) -> Spread | None:
    times = [cpu_ms(run.measured) for run in alone(sweep.runs_of(row))]
    return spread_of([ms for ms in times if ms])


def _over(first: Spread | None, second: Spread | None) -> Spread | None:
    """Times of A over those of B, as far as the quartiles of both let them be."""
    if not (first and second and second.low):
        return None
    return Spread(
        first.median / second.median,
        first.low / second.high,
        first.high / second.low,
        min(first.n, second.n),
    )


def _check_judged(judged: str | None, compared: Sequence[Sequence[Comparison]]) -> None:
    names = dict.fromkeys(one.name for ones in compared for one in ones)
    if judged is not None and judged not in names:
        raise ValueError(
            f"--judge {judged}: no row has it in both sweeps. Expected one of: "
            f"{', '.join(map(repr, names)) or 'nothing, for there is no quantity in both'}."
        )


def _alone(sweep: Stored, other: Stored) -> list[str]:
    labels = {row.label for row in other.results.rows}
    return [row.name for row in sweep.results.rows if row.label not in labels]


def _differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*first, *second])
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    }
