"""Draws the pictures of a sweep: the loss by step and by time, and the speed.

The colour shows the opt level, by a palette for colour-blind readers (Okabe and Ito, "Color
Universal Design", 2008, without yellow).  The same data give the same bytes, because files have no
dates, and fixed names inside an SVG.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas
from matplotlib import style
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure  # not pyplot, which has global state
from pandas import DataFrame

from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.report import provenance
from ampatch.sweep.report.margin import LAST_LOSS
from ampatch.sweep.report.numbers import ratio
from ampatch.sweep.report.results import FORMATS, Results, Row
from ampatch.sweep.report.run_figures import main_losses
from ampatch.sweep.report.table import accuracy_mark, speed_mark
from ampatch.sweep.trial import BASE

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
WIDTH, DPI = 4.6, 240  # width in inches: legible in a column of a paper and on a phone
NAME_WIDTH = 24  # letters in a line beside bars
MAX_POINTS = 40  # points of a line; more are averaged in blocks, then over the seeds
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "grid.alpha": 0.25,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "legend.handlelength": 3.0,
    "pdf.fonttype": 42,  # TrueType; some publishers refuse type 3
    "svg.hashsalt": "ampatch",
    "text.parse_math": False,  # because names of rows may have a $
}
LOOKS = (
    "Dashed lines and lighter bars are bfloat16. Bands are the range over seeds, whiskers the "
    "quartiles over rounds; \N{DAGGER} and \N{DOUBLE DAGGER} are those of the table."
)


@dataclass(frozen=True)
class Picture:
    """A picture in each format."""

    name: str  # file name without ending
    caption: str
    files: dict[str, bytes]  # by format

    @property
    def address(self) -> str:
        """The SVG as a data URL, for a page that contains it."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.files['svg']).decode()}"


def pictures(results: Results, runs: Sequence[Run]) -> list[Picture]:
    """The pictures that have something to draw."""
    losses = losses_of(runs)
    drawn = (_by_step(results, losses), _by_time(results, losses), _speed(results))
    return [picture for picture in drawn if picture is not None]


def _by_step(results: Results, losses: DataFrame) -> Picture | None:
    lines, deviations = lines_of(losses), lines_of(differences(losses))
    if not lines:
        return None
    panels, caption = [_losses_of(lines)], "Training loss by step"
    if deviations.keys() - {BASE.label}:
        panels.append(_Panel(1.5, _draw_differences, deviations))
        caption += (
            "; below, the difference from O0 at the same step and seed (grey: O0's own seeds)"
        )
    return _picture("loss-by-step", f"{caption}.", "optimizer step", results, panels)


def _by_time(results: Results, losses: DataFrame) -> Picture | None:
    lines = lines_of(losses, "seconds")
    if len(lines) < 2:  # a single line looks the same by step
        return None
    x_label, panels = "time since the first loss (s)", [_losses_of(lines)]
    return _picture("loss-by-time", "Training loss by time.", x_label, results, panels)


def _speed(results: Results) -> Picture | None:
    timed = [row for row in results.rows if row.speeds is not None and row.label != BASE.label]
    if not timed:
        return None
    caption = (
        "Speed relative to O0 in the same round, and the median time of a step; grey: what O0 "
        "itself differed by."
    )
    lines = sum(textwrap.fill(row.name, NAME_WIDTH).count("\n") + 1 for row in timed)
    panels = [_Panel(0.9 + 0.12 * len(timed) + 0.17 * lines, _draw_bars, timed)]
    x_label = "speed relative to O0 (times; larger is faster)"
    return _picture("speed", caption, x_label, results, panels)


class _Panel(NamedTuple):
    height: float  # in inches
    draw: Callable[[Any, Results, Any], None]  # draws (axes, results, data)
    data: Any


def _losses_of(lines: dict[str, DataFrame]) -> _Panel:
    """The panel above the legend."""
    return _Panel(2.7 + 0.19 * math.ceil(len(lines) / 2), _draw_lines, lines)


def _picture(
    name: str, caption: str, x_label: str, results: Results, panels: Sequence[_Panel]
) -> Picture:
    """The panels, one below the other, with `x_label` under the last; lines get a legend."""
    with style.context(["default", STYLE]):  # so that the user's style has no effect
        heights = [panel.height for panel in panels]
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        grid = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
        for panel, (axes,) in zip(panels, grid):
            panel.draw(axes, results, panel.data)
        axes.set_xlabel(x_label)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        if labels:
            columns = 1 if max(map(len, labels)) > 28 else 2
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # lay out only once, for all formats
        description = f"{caption} {'; '.join(provenance.lines(results))}"
        metadata = {
            "svg": {"Title": caption, "Description": description, "Date": None},
            "pdf": {"Title": caption, "Subject": description, "CreationDate": None},
            "png": {"Title": caption, "Description": description},
        }
        files = {}
        for form in FORMATS:
            figure.savefig(buffer := io.BytesIO(), format=form, dpi=DPI, metadata=metadata[form])
            files[form] = buffer.getvalue()
    return Picture(name, caption, files)


def _draw_lines(
    axes: Any, results: Results, lines: dict[str, DataFrame], title: str = "training loss"
) -> None:
    drawn = [row for row in results.rows if row.label in lines]
    for number, row in enumerate(drawn):
        line, style_ = lines[row.label], _style(results, row)
        # Each line is thinner than the one before, so that equal lines are all visible.
        width = 2.9 - 1.9 * number / max(1, len(drawn) - 1)
        axes.plot(
            line.x, line.y, label=row.name + accuracy_mark(row, LAST_LOSS), lw=width, **style_
        )
        if row.seeds > 1:
            band = {"color": style_["color"], "alpha": 0.1, "lw": 0}
            axes.fill_between(line.x, line.low, line.high, **band)
    limits = [limit for line in lines.values() for limit in (*line.low, *line.high)]
    values = [limit for limit in limits if not math.isnan(limit)]
    if min(values) > 0 and max(values) > 50 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(title)


def _draw_differences(axes: Any, results: Results, deviations: dict[str, DataFrame]) -> None:
    """Draw differences in percent; with large differences the axis is logarithmic beyond 1 %."""
    lines = {label: line for label, line in deviations.items() if label != BASE.label}
    axes.axhline(0, color="#000000", lw=0.8)
    _draw_lines(axes, results, lines, "difference\nfrom O0 (%)")
    if max(line.y.abs().max() for line in lines.values()) > 5:
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(axes.get_ylim())  # fixes the limits before the scatter of O0 is drawn
    if BASE.label in deviations:
        base = deviations[BASE.label]
        axes.fill_between(base.x, base.low, base.high, color="#8c8c8c", alpha=0.35, lw=0, zorder=0)


def _draw_bars(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    """Draw a bar for each row, the first row on top, with its text on the right."""
    texts = []
    for position, row in enumerate(rows):
        speeds = row.speeds
        assert speeds is not None
        judged_mark = accuracy_mark(row, row.comparisons[0].name) if row.comparisons else ""
        marks = speed_mark(row) + judged_mark
        colour = to_rgb(_style(results, row)["color"])
        if row.dtype == "bfloat16":
            colour = tuple(0.45 + 0.55 * channel for channel in colour)
        whiskers = [[speeds.median - speeds.low], [speeds.high - speeds.median]]
        axes.barh(
            position, speeds.median, height=0.6, color=colour, edgecolor="white", linewidth=0,
            xerr=whiskers if speeds.n > 1 else None,
            error_kw={"ecolor": "#666666", "elinewidth": 1, "capsize": 2.5},
        )  # fmt: skip
        texts.append(f"{ratio(speeds.median)}x{marks}, {row.step_ms:.3g} ms")
    axes.set_yticks(range(len(rows)), [textwrap.fill(row.name, NAME_WIDTH) for row in rows])
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.axvline(1, color="#333333", lw=1, ls=":")
    if reach := rows[0].reach:
        axes.axvspan(1 / reach, reach, color="#8c8c8c", alpha=0.25, lw=0, zorder=0)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(rows)), texts)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)


def _style(results: Results, row: Row) -> dict[str, Any]:
    levels = dict.fromkeys(row.opt_level for row in results.rows)
    colours = dict(zip(levels, itertools.cycle(COLOURS)))
    dashes = (0, (4, 1.5)) if row.dtype == "bfloat16" else "-"
    return {"color": colours[row.opt_level], "linestyle": dashes}


# The lines are data frames of pandas: one frame per row, over all its seeds


def losses_of(runs: Iterable[Run]) -> DataFrame:
    """A line for each loss of a full run, with its number `n` in the run; NaN if not finite.

    `seconds` is the time since the first loss of the run.
    """
    frames = []
    for run in runs:
        series = main_losses(run.measured)
        if run.trial.short or not series.values:
            continue
        frame = pandas.DataFrame({"step": series.steps, "loss": series.values}, dtype=float)
        frame["seconds"] = [second - series.seconds[0] for second in series.seconds] or math.nan
        frames.append(frame.assign(row=run.case.label, seed=run.trial.seed, n=frame.index))
    columns = ["row", "seed", "n", "step", "seconds", "loss"]
    losses = pandas.concat(frames) if frames else pandas.DataFrame(columns=columns)
    return losses.replace([math.inf, -math.inf], math.nan)[columns]


def differences(losses: DataFrame) -> DataFrame:
    """The losses minus O0's at the same step with the same seed, in percent of O0's.

    For O0: its losses minus the mean over its seeds, if it has two or more.  Empty without O0.
    """
    keys = ["seed", "n", "step"]
    base = losses[losses.row == BASE.label]
    both = losses.merge(base[[*keys, "loss"]].rename(columns={"loss": "reference"}), on=keys)
    is_base = both.row == BASE.label
    both.loc[is_base, "reference"] = both[is_base].groupby("n").loss.transform("mean")
    reference = both.reference.abs().replace(0, math.nan)
    both = both.assign(loss=100 * (both.loss - both.reference) / reference)
    return both if base.seed.nunique() > 1 else both[~is_base]


def lines_of(losses: DataFrame, x_name: str = "step") -> dict[str, DataFrame]:
    """The line of each row of `losses_of` or `differences`: `x`, `y`, `low` and `high` by block.

    Rows without a finite number have no line.
    """
    size = max(1, math.ceil((losses.n.max() + 1) / MAX_POINTS)) if len(losses) else 1
    seeds = losses.groupby(["row", "seed", losses.n // size])[[x_name, "loss"]].mean()
    blocks = seeds.groupby(level=["row", "n"], sort=False)
    y = blocks["loss"]
    points = blocks[[x_name]].mean().set_axis(["x"], axis=1)
    points = points.assign(y=y.mean(), low=y.min(), high=y.max())
    lines = {label: line.droplevel("row") for label, line in points.groupby(level="row")}
    return {label: line for label, line in lines.items() if line.y.notna().any()}
