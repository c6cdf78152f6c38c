"""The curves in the pictures of a sweep: one per row, made of the series of its seeds.

A long series is averaged in up to `POINTS` blocks, then over the seeds; `low` and `high`
are the minimum and maximum over the seeds.  Of the repeats of a seed the first is drawn.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ampatch.sweep.measure.record import Measured, Run, Series
from ampatch.sweep.report.figures import main_losses
from ampatch.sweep.report.results import Row

POINTS = 40


@dataclass(frozen=True)
class Curve:
    """The line of one row.  `breaks` are the last points before a loss became non-finite."""

    row: Row
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    breaks: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.row.name


@dataclass(frozen=True)
class _Point:
    x: float
    y: float  # NaN where no value of the block is finite


def loss_curves(rows: Sequence[Row], runs: Sequence[Run], by_time: bool) -> list[Curve]:
    """The loss against optimizer steps, or against seconds since the first loss."""
    curves = []
    for row in rows:
        series = [main_losses(measured) for measured in _first_repeats(row, runs)]
        lines = [_blocks(one, by_time) for one in series if one.values]
        if any(map(_finite, lines)):
            curves.append(_curve(row, lines))
    return curves


def scale_curves(rows: Sequence[Row], runs: Sequence[Run]) -> list[Curve]:
    """The loss scale of the first seed against optimizer steps, for rows where it is not 1."""
    curves = []
    for row in rows:
        for measured in _first_repeats(row, runs)[:1]:
            changes = _main(measured.loss_scales)
            if set(changes.values) - {1.0}:
                x = [*map(float, changes.steps), float(len(measured.skipped))]
                y = [*changes.values, changes.values[-1]]
                curves.append(Curve(row, x, y, y, y))
    return curves


def _first_repeats(row: Row, runs: Iterable[Run]) -> list[Measured]:
    """The first run of each seed, in the order of the seeds."""
    firsts = [run for run in runs if run.case.label == row.label and run.trial.repeat == 0]
    firsts = [run for run in firsts if not run.trial.short]
    firsts.sort(key=lambda run: run.trial.seed)
    return [run.measured for run in firsts if run.measured is not None]


def _main(table: dict[str, Series]) -> Series:
    """The series of the lowest `loss_id`."""
    return main_losses(Measured(losses=table))


def _blocks(series: Series, by_time: bool) -> list[_Point]:
    """The means of up to `POINTS` blocks, over their finite values."""
    if by_time:
        xs = [second - series.seconds[0] for second in series.seconds]
    else:
        xs = [float(step) for step in series.steps]
    size = math.ceil(len(series.values) / POINTS)
    points = []
    for start in range(0, len(xs), size):
        values = [v for v in series.values[start : start + size] if math.isfinite(v)]
        y = statistics.fmean(values) if values else math.nan
        points.append(_Point(statistics.fmean(xs[start : start + size]), y))
    return points


def _curve(row: Row, lines: Sequence[list[_Point]]) -> Curve:
    """The mean over the seeds that reached a point, for each point."""
    x, y, low, high = [], [], [], []
    for points in itertools.zip_longest(*lines):
        there = [point for point in points if point is not None]
        values = [point.y for point in there if not math.isnan(point.y)] or [math.nan]
        x.append(statistics.fmean(point.x for point in there))
        y.append(statistics.fmean(values))
        low.append(min(values))
        high.append(max(values))
    ends = [_finite(line)[-1] for line in lines if _finite(line) and math.isnan(line[-1].y)]
    return Curve(row, x, y, low, high, [(point.x, point.y) for point in ends])


def _finite(line: Iterable[_Point]) -> list[_Point]:
    return [point for point in line if not math.isnan(point.y)]
