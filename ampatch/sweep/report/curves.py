"""The lines in the pictures of a sweep, as data frames of pandas: one per row, of all its seeds.

A long series is averaged in up to `POINTS` blocks, then over the seeds; `low` and `high`
are the least and the greatest of the seeds.

Curves that lie on each other show nothing; what is between them does.  So there are also
the differences from O0, step by step at the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ampatch.sweep.measure.record import Measured, Run
from ampatch.sweep.report.figures import main_losses
from ampatch.sweep.trial import BASE

if TYPE_CHECKING:
    from pandas import DataFrame

POINTS = 40
NEAR = 0.02  # of the height of a picture: lines that are closer lie on each other


def losses(runs: Iterable[Run]) -> DataFrame:
    """A line for each loss: row, seed, its place `n`, step, seconds since the first, and `loss`.

    A loss that is not finite is NaN.
    """
    import pandas

    parts = []
    for run in _whole(runs):
        series = main_losses(run.measured)
        if not series.values:
            continue
        part = pandas.DataFrame({"step": series.steps, "loss": series.values}, dtype=float)
        part["seconds"] = [second - series.seconds[0] for second in series.seconds] or math.nan
        parts.append(part.assign(row=run.case.label, seed=run.trial.seed, n=part.index))
    columns = ["row", "seed", "n", "step", "seconds", "loss"]
    found = pandas.concat(parts) if parts else pandas.DataFrame(columns=columns)
    return found.replace([math.inf, -math.inf], math.nan)[columns]


def differences(found: DataFrame) -> DataFrame:
    """`losses` less O0's at the same step of the same seed; O0's own seeds less their mean.

    Without O0 there are none, and without a second seed none of O0's own.
    """
    at = ["seed", "n", "step"]
    base = found[found.row == BASE.label]
    both = found.merge(base[[*at, "loss"]].rename(columns={"loss": "reference"}), on=at)
    own = both.row == BASE.label
    both.loc[own, "reference"] = both[own].groupby("n").loss.transform("mean")
    both = both.assign(loss=both.loss - both.reference)
    return both if base.seed.nunique() > 1 else both[~own]


def lines(found: DataFrame, along: str = "step") -> dict[str, DataFrame]:
    """By row the line of `losses` or `differences`: `x`, `y`, `low` and `high`, by block.

    Rows without a number are left out.
    """
    seeds = _blocks(found, along)
    rows = seeds.groupby(level=["row", "n"], sort=False)
    y = rows["loss"]
    line = rows[[along]].mean().set_axis(["x"], axis=1)
    line = line.assign(y=y.mean(), low=y.min(), high=y.max())
    of_rows = {label: part.droplevel("row") for label, part in line.groupby(level="row")}
    return {label: part for label, part in of_rows.items() if part.y.notna().any()}


def breaks(found: DataFrame, along: str = "step") -> dict[str, list[tuple[float, float]]]:
    """By row the last points of those seeds whose losses became non-finite for good."""
    ends: dict[str, list[tuple[float, float]]] = {}
    for (label, _), seed in _blocks(found, along).groupby(level=["row", "seed"]):
        finite = seed[seed.loss.notna()]
        if len(finite) and math.isnan(seed.loss.iloc[-1]):
            ends.setdefault(label, []).append((finite[along].iloc[-1], finite.loss.iloc[-1]))
    return ends


def in_percent(apart: DataFrame, of: DataFrame) -> DataFrame:
    """The line `apart` in percent of the line `of` at the same blocks."""
    values = apart[["y", "low", "high"]].div(of.y.reindex(apart.index), axis=0)
    return apart.assign(**100 * values)


def near_base(
    drawn: dict[str, DataFrame], apart: dict[str, DataFrame], logarithmic: bool
) -> list[str]:
    """The rows that `drawn` shows as one line with O0's.

    `apart` are their differences from it, on a logarithmic axis in percent.
    """
    values = [y for line in drawn.values() for y in line.y.dropna()]
    height = math.log(max(values) / min(values)) if logarithmic else max(values) - min(values)
    most = NEAR * height * (100 if logarithmic else 1)
    others = (label for label in apart if label != BASE.label)
    return [label for label in others if apart[label].y.abs().median() <= most]


def scales(runs: Iterable[Run]) -> dict[str, DataFrame]:
    """By row the loss scale of the first seed: `x` and `y` where it changes, and at the end.

    Rows whose loss is not scaled are left out.
    """
    import pandas

    found = {}
    for run in sorted(_whole(runs), key=lambda run: run.trial.seed, reverse=True):
        changes = main_losses(Measured(losses=run.measured.loss_scales))
        if set(changes.values) - {1.0}:
            x = [*changes.steps, len(run.measured.skipped)]
            y = [*changes.values, changes.values[-1]]
            found[run.case.label] = pandas.DataFrame({"x": x, "y": y})
    return found


def _whole(runs: Iterable[Run]) -> list[Run]:
    """The runs without the short ones."""
    return [run for run in runs if run.measured and not run.trial.short]


def _blocks(found: DataFrame, along: str) -> DataFrame:
    """The means of each row, seed and block; NaN where no loss of the block is finite."""
    size = max(1, math.ceil((found.n.max() + 1) / POINTS)) if len(found) else 1
    return found.groupby(["row", "seed", found.n // size])[[along, "loss"]].mean()
