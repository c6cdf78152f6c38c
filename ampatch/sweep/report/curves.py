"""The lines in the pictures of a sweep, as data frames of pandas: one per row, of all its seeds.

A long series is averaged in up to `POINTS` blocks, then over the seeds; `low` and `high`
are the least and the greatest of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.figures import main_losses
from ampatch.sweep.trial import BASE

if TYPE_CHECKING:
    from pandas import DataFrame

POINTS = 40


def losses(runs: Iterable[Run]) -> DataFrame:
    """A line for each loss of whole runs; `seconds` are those since the run's first loss.

    `n` is its place in the run.  A loss that is not finite is NaN.
    """
    import pandas

    parts = []
    for run in runs:
        series = main_losses(run.measured)
        if run.trial.short or not series.values:
            continue
        part = pandas.DataFrame({"step": series.steps, "loss": series.values}, dtype=float)
        part["seconds"] = [second - series.seconds[0] for second in series.seconds] or math.nan
        parts.append(part.assign(row=run.case.label, seed=run.trial.seed, n=part.index))
    columns = ["row", "seed", "n", "step", "seconds", "loss"]
    found = pandas.concat(parts) if parts else pandas.DataFrame(columns=columns)
    return found.replace([math.inf, -math.inf], math.nan)[columns]


def differences(found: DataFrame) -> DataFrame:
    """`losses` less O0's at the same step of the same seed; O0's own seeds less their mean.

    In percent of O0's.  Without O0 there are none, and without a second seed none of O0's own.
    """
    at = ["seed", "n", "step"]
    base = found[found.row == BASE.label]
    both = found.merge(base[[*at, "loss"]].rename(columns={"loss": "reference"}), on=at)
    own = both.row == BASE.label
    both.loc[own, "reference"] = both[own].groupby("n").loss.transform("mean")
    reference = both.reference.abs().replace(0, math.nan)
    both = both.assign(loss=100 * (both.loss - both.reference) / reference)
    return both if base.seed.nunique() > 1 else both[~own]


def lines(found: DataFrame, along: str = "step") -> dict[str, DataFrame]:
    """By row the line of `losses` or `differences`: `x`, `y`, `low` and `high`, by block.

    Rows without a number are left out.
    """
    size = max(1, math.ceil((found.n.max() + 1) / POINTS)) if len(found) else 1
    seeds = found.groupby(["row", "seed", found.n // size])[[along, "loss"]].mean()
    rows = seeds.groupby(level=["row", "n"], sort=False)
    y = rows["loss"]
    line = rows[[along]].mean().set_axis(["x"], axis=1)
    line = line.assign(y=y.mean(), low=y.min(), high=y.max())
    of_rows = {label: part.droplevel("row") for label, part in line.groupby(level="row")}
    return {label: part for label, part in of_rows.items() if part.y.notna().any()}
