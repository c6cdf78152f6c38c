"""The pictures of a sweep: losses, speed, memory, loss scale, each with its caption.

A row has the same colour and dashes in every picture.  Colours are opt levels, chosen
for colour-blind readers (Okabe and Ito, "Color Universal Design", 2008, without yellow,
which is hard to see on white).  Dashes, and stripes of bars, are bfloat16.

A picture that would show nothing is left out, and a sentence says what it would have shown.
"""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.curves import (
    Curve,
    difference_curves,
    in_percent,
    loss_curves,
    near_base,
    scale_curves,
)
from ampatch.sweep.report.drawing import (
    Bar,
    Origin,
    Sheet,
    bars,
    bars_height,
    have_wide_axis,
    is_wide,
    logarithmic,
    plain,
    powers_of_two,
    widths,
)
from ampatch.sweep.report.numbers import counted, ratio
from ampatch.sweep.report.provenance import sentence, software
from ampatch.sweep.report.results import Results, Row
from ampatch.sweep.report.table import MARKS, NOT_TOLD_APART, speed_mark
from ampatch.sweep.trial import BASE

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#8c8c8c"
NAME = 24  # letters in a line beside bars
DASHES = {"bfloat16": (0, (4, 1.5))}
STRIPES = {"bfloat16": "////"}
SAME_MEMORY = {"device": 0.05, "resident": 0.1}  # a smaller share of the most says nothing
MISSING = (
    "No plots: matplotlib is not installed. pip install matplotlib, or pip install "
    "ampatch[sweep]; then `ampatch report DIR` draws them."
)


@dataclass(frozen=True)
class Picture:
    """A picture in each format; `alt` describes it in words."""

    name: str  # of the files, without ending
    title: str
    caption: str  # what is drawn, in which units, and what bands and marks are
    alt: str
    files: dict[str, bytes]  # by format

    @property
    def address(self) -> str:
        """The SVG as an address, for a page that has it inside."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.files['svg']).decode()}"


@dataclass
class Gallery:
    """The pictures of a sweep, and a sentence for each that would show nothing."""

    pictures: list[Picture] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """What every picture needs: the rows, their colours, and where they come from."""

    rows: list[Row]
    runs: Sequence[Run]
    colours: dict[str, str]  # by opt level
    script: str
    made_with: str
    provenance: str

    @classmethod
    def of(cls, results: Results, runs: Sequence[Run]) -> _Plan:
        levels = dict.fromkeys(row.opt_level for row in results.rows)
        return cls(
            results.rows,
            runs,
            dict(zip(levels, itertools.cycle(COLOURS))),
            Path(results.script).name,
            software(results),
            sentence(results),
        )

    def line(self, row: Row) -> dict[str, Any]:
        return {"color": self.colours[row.opt_level], "linestyle": DASHES.get(row.dtype, "-")}

    def bar(self, row: Row) -> dict[str, Any]:
        look = {"color": self.colours[row.opt_level], "edgecolor": "white", "linewidth": 0}
        return {**look, "hatch": STRIPES.get(row.dtype)}

    def picture(
        self, name: str, title: str, said: Sequence[str], alt: str, sheet: Sheet, draw: Any
    ) -> Picture:
        ending = f"Script: {self.script}; {self.made_with}."
        caption = " ".join([f"{title}.", *filter(None, said), ending])
        files = sheet.saved(draw, Origin(title, caption, self.provenance))
        return Picture(name, title, caption, alt, files)


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def gallery(results: Results, runs: Sequence[Run]) -> Gallery:
    """The pictures for which there is something to draw.  Needs matplotlib."""
    plan = _Plan.of(results, runs)
    made = Gallery()
    for drawn in (
        _losses(plan),
        _losses_by_time(plan),
        _speeds(plan),
        _memory(plan),
        _scales(plan),
    ):
        if isinstance(drawn, Picture):
            made.pictures.append(drawn)
        elif drawn:
            made.left_out.append(drawn)
    return made


def _losses(plan: _Plan) -> Picture | None:
    """Losses against steps; below them the differences of rows that lie on O0's line."""
    curves = loss_curves(plan.rows, plan.runs, by_time=False)
    if not curves:
        return None
    wide = is_wide(_values(curves))
    differences = difference_curves(plan.rows, plan.runs)
    near = near_base(curves, differences, wide)  # in percent on a logarithmic axis
    own = [curve for curve in differences if curve.row.label == BASE.label]
    own = in_percent(own, curves) if wide else own

    def draw(panels: list[Any]) -> None:
        _draw_losses(panels[0], curves, plan, wide)
        if near:
            _draw_differences(panels[1], near, own, plan)
            panels[1].set_ylabel("difference from\nO0's (%)" if wide else "difference from\nO0's")
        panels[-1].set_xlabel("optimizer step")

    said = ["Lines are means over the seeds, and over blocks of steps.", *_bands(curves)]
    if near:
        said.append(_of_differences(near, curves, bool(own), wide))
    alt = (
        "Loss against step, a line per row, the mean over its seeds. "
        + "; ".join(f"{c.name}: {_from_to(c)} {c.x[-1]:.4g} steps" for c in curves)
        + ". "
        + "; ".join(f"{c.name}: {_apart(c)}{' %' if wide else ''} from O0" for c in near)
    )
    height = _height(curves)
    sheet = Sheet(height + 1.5, True, (2.0, 1.2)) if near else Sheet(height, True)
    return plan.picture("loss-by-step", "Training loss against steps", said, alt, sheet, draw)


def _losses_by_time(plan: _Plan) -> Picture | None:
    curves = loss_curves(plan.rows, plan.runs, by_time=True)
    if len(curves) < 2:  # one line is the same against steps
        return None
    wide = is_wide(_values(curves))

    def draw(panels: list[Any]) -> None:
        _draw_losses(panels[0], curves, plan, wide)
        panels[0].set_xlabel("time since the first loss (s)")

    said = ["Lines are means over the seeds, and over blocks of steps.", *_bands(curves)]
    alt = "Loss against time, a line per row, the mean over its seeds. " + "; ".join(
        f"{c.name}: {_from_to(c)} {c.x[-1]:.4g} seconds" for c in curves
    )
    sheet = Sheet(_height(curves), True)
    title = "Training loss against time"
    return plan.picture("loss-by-time", title, said, f"{alt}.", sheet, draw)


def _draw_losses(axes: Any, curves: Sequence[Curve], plan: _Plan, wide: bool) -> None:
    for curve, width in widths(curves):
        colour = plan.colours[curve.row.opt_level]
        axes.plot(curve.x, curve.y, label=plain(curve.name), lw=width, **plan.line(curve.row))
        if curve.row.seeds > 1:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.1, lw=0)
        for x, y in curve.breaks:
            axes.plot(x, y, "X", ms=8, color=colour)
    if wide:
        logarithmic(axes, _values(curves))
    axes.set_ylabel("training loss")


def _draw_differences(axes: Any, near: Sequence[Curve], own: Sequence[Curve], plan: _Plan) -> None:
    """The lines of `near`, in front of the scatter of O0's `own` seeds."""
    for curve in own:
        axes.fill_between(curve.x, curve.low, curve.high, color=GREY, alpha=0.35, lw=0)
    axes.axhline(0, color="#000000", lw=0.8)
    values = _values(near)
    margin = 0.15 * (max(values) - min(values)) or 1.0
    axes.set_ylim(min(0, min(values)) - margin, max(0, max(values)) + margin)
    for curve, width in widths(near):
        axes.plot(curve.x, curve.y, lw=0.6 * width, **plan.line(curve.row))
        if curve.row.seeds > 1:
            colour = plan.colours[curve.row.opt_level]
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.12, lw=0)


def _of_differences(
    near: Sequence[Curve], curves: Sequence[Curve], own: bool, in_percents: bool
) -> str:
    """What the lower panel of the losses shows."""
    known = {BASE.label, *(curve.row.label for curve in near)}
    band = "with the range over the seeds" if any(c.row.seeds > 1 for c in near) else "of one seed"
    said = f"Below: the difference from O0 at the same step and seed, {band}"
    if in_percents:
        said += ", in percent of O0's line above"
    if any(curve.row.label not in known for curve in curves):
        said += ", for rows whose line lies on O0's"
    if own:
        said += "; grey, cut at the edges: the range of O0's own seeds around their mean"
    return f"{said}."


def _scales(plan: _Plan) -> Picture | str | None:
    curves = scale_curves(plan.rows, plan.runs)
    if not curves:
        return None
    if all(len(set(curve.y)) == 1 for curve in curves):
        values = sorted({f"{curve.y[0]:g}" for curve in curves})
        return f"The loss scale is not drawn: it stayed at {', '.join(values)}."

    def draw(panels: list[Any]) -> None:
        for curve, width in widths(curves):
            panels[0].step(
                curve.x, curve.y, where="post", label=plain(curve.name), lw=width,
                **plan.line(curve.row),
            )  # fmt: skip
        powers_of_two(panels[0])
        panels[0].margins(y=0.15)
        panels[0].set_xlabel("optimizer step")
        panels[0].set_ylabel("loss scale")

    alt = "Loss scale over the training of the first seed, a line per row. " + "; ".join(
        f"{c.name}: {c.y[0]:g} to {c.y[-1]:g} in {c.x[-1]:.0f} steps, "
        f"{counted(c.row.skipped, 'skipped step')}"
        for c in curves
    )
    said = ["The first seed of each row whose loss is scaled. A fall is an overflow."]
    sheet = Sheet(_height(curves), True)
    return plan.picture("loss-scale", "Loss scale against steps", said, f"{alt}.", sheet, draw)


def _speeds(plan: _Plan) -> Picture | None:
    timed = [row for row in plan.rows if row.speeds is not None]
    if all(row.label == BASE.label for row in timed):  # O0 is as fast as itself
        return None
    drawn = [
        Bar(
            _wrapped(row), row.speeds.median,
            f"{ratio(row.speeds.median)}x{speed_mark(row)}, {row.step_ms:.3g} ms", plan.bar(row),
            row.speeds.low, row.speeds.high,
        )
        for row in timed
    ]  # fmt: skip

    def draw(panels: list[Any]) -> None:
        bars(panels[0], drawn)
        panels[0].axvline(1, color="#333333", lw=1, ls=":")
        panels[0].set_xlabel("speed relative to O0 (times; larger is faster)")

    alt = "Bars of the speed relative to O0. " + "; ".join(
        f"{row.name}: {ratio(row.speeds.median)} times O0's, "
        f"{ratio(row.speeds.low)} to {ratio(row.speeds.high)} over {counted(row.speeds.n, 'round')}"
        for row in timed
    )
    rounds = max(row.speeds.n for row in timed)
    said = [
        "Bars, and the numbers beside them: the median of the ratios to O0 in the same round, and "
        "the median time of a step.",
        f"Whiskers: quartiles of the ratios of {counted(rounds, 'round')}." if rounds > 1 else "",
        "O0's own ratio is that of its second run in each round to its first.",
        f"{NOT_TOLD_APART} {MARKS[NOT_TOLD_APART]}." if any(map(speed_mark, timed)) else "",
        "The axis is logarithmic; bars begin at 1." if have_wide_axis(drawn) else "",
    ]
    sheet = Sheet(bars_height(drawn))
    return plan.picture("speed", "Speed relative to O0", said, f"{alt}.", sheet, draw)


def _memory(plan: _Plan) -> Picture | str | None:
    known = [row for row in plan.rows if row.memory_bytes is not None]
    if len(known) < 2:
        return None
    values = [row.memory_bytes / 2**20 for row in known]
    low, high = min(values), max(values)
    counted_as = known[0].memory_kind
    kind = "allocated on the device" if counted_as == "device" else "resident, PyTorch included"
    if high - low < max(SAME_MEMORY[counted_as] * high, _memory_noise(plan.runs)):
        return (
            f"Peak memory is not drawn: it is {low:.0f} to {high:.0f} MiB ({kind}) in all rows, "
            "and so small a difference says nothing."
        )
    drawn = [
        Bar(_wrapped(row), value, f"{value:.0f} MiB", plan.bar(row))
        for row, value in zip(known, values)
    ]

    def draw(panels: list[Any]) -> None:
        bars(panels[0], drawn)
        panels[0].set_xlabel("peak memory (MiB)")

    alt = f"Bars of the peak memory ({kind}). " + "; ".join(
        f"{row.name}: {value:.0f} MiB" for row, value in zip(known, values)
    )
    said = [f"Memory is {kind}; the largest of a row's runs. 1 MiB is 2^20 bytes."]
    sheet = Sheet(bars_height(drawn))
    return plan.picture("memory", "Peak memory", said, f"{alt}.", sheet, draw)


def _memory_noise(runs: Sequence[Run]) -> float:
    """The largest difference between runs of the same row, in MiB."""
    of_row: dict[str, list[float]] = {}
    for run in runs:
        if run.measured is not None and run.measured.memory_bytes and not run.trial.short:
            of_row.setdefault(run.case.label, []).append(run.measured.memory_bytes / 2**20)
    return max((max(values) - min(values) for values in of_row.values()), default=0.0)


def _bands(curves: Sequence[Curve]) -> list[str]:
    """What bands and marks are, where there are any."""
    seeds = max(curve.row.seeds for curve in curves)
    return [
        f"Bands: the range over {seeds} seeds." if seeds > 1 else "",
        "X: a seed's loss became non-finite." if any(c.breaks for c in curves) else "",
    ]


def _values(curves: Sequence[Curve]) -> list[float]:
    return [y for curve in curves for y in curve.low + curve.high if not math.isnan(y)]


def _height(curves: Sequence[Curve]) -> float:
    """Inches for one panel and the legend."""
    return 2.7 + 0.19 * math.ceil(len(curves) / 2)


def _wrapped(row: Row) -> str:
    """The name of a row in short lines, which end at a space or between settings."""
    lines = [""]
    for part in re.findall(r"[^-= ]*[-= ]?", row.name):
        if lines[-1] and len(lines[-1] + part.rstrip()) > NAME:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _from_to(curve: Curve) -> str:
    finite = [y for y in curve.y if not math.isnan(y)]
    return f"{finite[0]:.4g} to {finite[-1]:.4g} in"


def _apart(curve: Curve) -> str:
    low = min(y for y in curve.low if not math.isnan(y))
    high = max(y for y in curve.high if not math.isnan(y))
    return f"{low:+.2g} to {high:+.2g}"
