"""The curves in the pictures of a sweep: one per row, made of the series of its seeds.

A long series is averaged in up to `POINTS` blocks, then over the seeds; `low` and `high`
are the minimum and maximum over the seeds.  Of the repeats of a seed the first is drawn.

Curves that lie on each other show nothing; what is between them does.  So there are also
the differences from O0, step by step at the same seed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ampatch.sweep.measure.record import Measured, Run, Series
from ampatch.sweep.report.figures import main_losses
from ampatch.sweep.report.numbers import mean
from ampatch.sweep.report.results import Row
from ampatch.sweep.trial import BASE

POINTS = 40
NEAR = 0.02  # of the height of a picture: lines that are closer lie on each other


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
        series = list(_losses(row.label, runs).values())
        lines = [_blocks(one, by_time) for one in series if one.values]
        if any(map(_finite, lines)):
            curves.append(_curve(row, lines))
    return curves


def scale_curves(rows: Sequence[Row], runs: Sequence[Run]) -> list[Curve]:
    """The loss scale of the first seed against optimizer steps, for rows where it is not 1."""
    curves = []
    for row in rows:
        for measured in list(_first_repeats(row.label, runs).values())[:1]:
            changes = _main(measured.loss_scales)
            if set(changes.values) - {1.0}:
                x = [*map(float, changes.steps), float(len(measured.skipped))]
                y = [*changes.values, changes.values[-1]]
                curves.append(Curve(row, x, y, y, y))
    return curves


def difference_curves(rows: Sequence[Row], runs: Sequence[Run]) -> list[Curve]:
    """The losses less O0's at the same step of the same seed; O0's own seeds less their mean.

    Empty if there is no O0.
    """
    base = _losses(BASE.label, runs)
    curves = []
    for row in rows:
        if row.label == BASE.label:
            mean = _mean_of(list(base.values()))
            lines = [_less(one, mean) for one in base.values()]
        else:
            losses = _losses(row.label, runs)
            lines = [_less(losses[seed], base[seed]) for seed in losses if seed in base]
        points = [_blocks(line, by_time=False) for line in lines if line.values]
        if any(map(_finite, points)):
            curves.append(_curve(row, points))
    return curves if base else []


def near_base(
    curves: Sequence[Curve], differences: Sequence[Curve], logarithmic: bool
) -> list[Curve]:
    """Those of `differences`, O0's not among them, that `curves` show as one line with O0's."""
    base = _base(curves)
    if base is None:
        return []
    values = [value for curve in curves for value in curve.y if math.isfinite(value)]
    height = math.log(max(values) / min(values)) if logarithmic else max(values) - min(values)
    near = []
    for curve in in_percent(differences, curves) if logarithmic else differences:
        unit = 0.01 if logarithmic else 1.0
        apart = [abs(y) * unit for y in curve.y if math.isfinite(y)]
        if curve.row.label != BASE.label and apart and statistics.median(apart) <= NEAR * height:
            near.append(curve)
    return near


def in_percent(differences: Sequence[Curve], curves: Sequence[Curve]) -> list[Curve]:
    """`differences` in percent of O0's line at the same place."""
    base = _base(curves)
    if base is None:
        return []

    def shares(curve: Curve, values: Sequence[float]) -> list[float]:
        return [100 * value / _at(base, x) for x, value in zip(curve.x, values)]

    return [
        Curve(c.row, c.x, shares(c, c.y), shares(c, c.low), shares(c, c.high)) for c in differences
    ]


def _base(curves: Iterable[Curve]) -> Curve | None:
    """O0's curve."""
    return next((curve for curve in curves if curve.row.label == BASE.label), None)


def _at(curve: Curve, x: float) -> float:
    """The curve at its point that is nearest to `x`."""
    return min(zip(curve.x, curve.y), key=lambda point: abs(point[0] - x))[1]


def _losses(label: str, runs: Iterable[Run]) -> dict[int, Series]:
    """The losses of a row by seed, where there are any."""
    series = {seed: main_losses(one) for seed, one in _first_repeats(label, runs).items()}
    return {seed: losses for seed, losses in series.items() if losses.values}


def _less(series: Series, base: Series) -> Series:
    """`series` less `base`, as far as both were at the same steps."""
    there = [
        (step, value - other)
        for step, value, at, other in zip(series.steps, series.values, base.steps, base.values)
        if step == at
    ]
    return Series([step for step, _ in there], [value for _, value in there])


def _mean_of(lines: Sequence[Series]) -> Series:
    """The mean of the seeds as far as all of them go; without values for a single one."""
    if len(lines) < 2:
        return Series()
    values = [mean(column) for column in zip(*(line.values for line in lines))]
    return Series(lines[0].steps, values)


def _first_repeats(label: str, runs: Iterable[Run]) -> dict[int, Measured]:
    """What the first run of each seed measured, in the order of the seeds."""
    whole = [run for run in runs if run.case.label == label and not run.trial.short]
    firsts = [run for run in whole if run.trial.repeat == 0]
    firsts.sort(key=lambda run: run.trial.seed)
    return {run.trial.seed: run.measured for run in firsts if run.measured is not None}


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
        y.append(mean(values))
        low.append(min(values))
        high.append(max(values))
    ends = [_finite(line)[-1] for line in lines if _finite(line) and math.isnan(line[-1].y)]
    return Curve(row, x, y, low, high, [(point.x, point.y) for point in ends])


def _finite(line: Iterable[_Point]) -> list[_Point]:
    return [point for point in line if not math.isnan(point.y)]
