"""The pictures of a sweep: losses, speed, memory, loss scale, each with its caption.

A row has the same colour in every picture.  Colours are opt levels, chosen for colour-blind
readers (Okabe and Ito, "Color Universal Design", 2008, without yellow, which is hard to see on
white).  Dashed lines and lighter bars are bfloat16.  Stripes and dots of bars are verdicts.

A picture that would show nothing is left out, and a sentence says what it would have shown.
"""

from __future__ import annotations

import base64
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report import curves
from ampatch.sweep.report.drawing import Bar, bars, bars_height, have_wide_axis, is_wide, saved
from ampatch.sweep.report.margin import LOSS
from ampatch.sweep.report.numbers import counted, ratio
from ampatch.sweep.report.provenance import sentence, software
from ampatch.sweep.report.results import Results, Row, Spread
from ampatch.sweep.report.table import DIFFERS, MARKS, NOT_TOLD_APART, quality_mark, speed_mark
from ampatch.sweep.trial import BASE

if TYPE_CHECKING:
    from pandas import DataFrame

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#8c8c8c"
NAME = 24  # letters in a line beside bars
DASHES = {"bfloat16": (0, (4, 1.5))}
HATCHES = {NOT_TOLD_APART: "////", DIFFERS: "..."}
SAME_MEMORY = {"device": 0.05, "resident": 0.1}  # a smaller share of the most says nothing
MISSING = (
    'No plots: matplotlib or pandas is not installed. pip install "ampatch[sweep]"; then '
    "`ampatch report DIR` draws them."
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

    results: Results
    runs: Sequence[Run]
    colours: dict[str, str]  # by opt level

    @property
    def rows(self) -> dict[str, Row]:
        """By label."""
        return {row.label: row for row in self.results.rows}

    def drawn(self, lines: dict[str, DataFrame]) -> dict[str, tuple[Row, DataFrame]]:
        """The lines in the order of their rows."""
        return {label: (row, lines[label]) for label, row in self.rows.items() if label in lines}

    def line(self, row: Row) -> dict[str, Any]:
        return {"color": self.colours[row.opt_level], "linestyle": DASHES.get(row.dtype, "-")}

    def bar(self, row: Row, value: float, text: str, marks: str, spread: Spread | None) -> Bar:
        """A row's bar; `marks` are shown as stripes and dots."""
        from matplotlib.colors import to_rgb

        colour = to_rgb(self.colours[row.opt_level])
        if row.dtype == "bfloat16":
            colour = tuple(0.45 + 0.55 * part for part in colour)
        ends = (spread.low, spread.high) if spread else (value, value)
        hatch = "".join(HATCHES[mark] for mark in marks)
        return Bar(textwrap.fill(row.name, NAME), value, text, *ends, colour, hatch)

    def picture(
        self,
        name: str,
        title: str,
        said: Sequence[str],
        alt: str,
        heights: Sequence[float],
        draw: Callable[[list[Any]], None],
    ) -> Picture:
        ending = f"Script: {Path(self.results.script).name}; {software(self.results)}."
        caption = " ".join([f"{title}.", *filter(None, said), ending])
        files = saved(draw, heights, title, f"{caption} {sentence(self.results)}")
        return Picture(name, title, caption, alt, files)


def available() -> bool:
    """Whether matplotlib and pandas are installed."""
    try:
        import matplotlib.figure  # noqa: F401
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


def gallery(results: Results, runs: Sequence[Run]) -> Gallery:
    """The pictures for which there is something to draw.  Needs matplotlib and pandas."""
    levels = dict.fromkeys(row.opt_level for row in results.rows)
    plan = _Plan(results, runs, dict(zip(levels, itertools.cycle(COLOURS))))
    made = Gallery()
    for make in (_losses, _losses_by_time, _speeds, _memory, _scales):
        drawn = make(plan)
        if isinstance(drawn, Picture):
            made.pictures.append(drawn)
        elif drawn:
            made.left_out.append(drawn)
    return made


def _losses(plan: _Plan) -> Picture | None:
    """Losses against steps; below them the differences of rows that lie on O0's line."""
    found = curves.losses(plan.runs)
    lines = curves.lines(found)
    if not lines:
        return None
    wide = is_wide(_values(lines))
    apart = curves.lines(curves.differences(found))
    if wide and BASE.label in lines:
        base = lines[BASE.label]
        apart = {label: curves.in_percent(line, base) for label, line in apart.items()}
    near = curves.near_base(lines, apart, wide)
    below = plan.drawn({label: apart[label] for label in near})
    own = apart.get(BASE.label)

    def draw_below(axes: Any) -> None:
        _draw_differences(axes, plan, below, own)
        axes.set_ylabel("difference from\nO0's" + (" (%)" if wide else ""))

    said = [_of_differences(plan, lines, near, own is not None, wide)] if near else []
    unit = " %" if wide else ""
    alt = "; ".join(
        f"{row.name}: {line.low.min():+.2g} to {line.high.max():+.2g}{unit} from O0"
        for row, line in below.values()
    )
    return _loss_picture(plan, found, "step", said, alt, draw_below if near else None)


def _losses_by_time(plan: _Plan) -> Picture | None:
    found = curves.losses(plan.runs)
    if len(curves.lines(found)) < 2:  # one line is the same against steps
        return None
    return _loss_picture(plan, found, "seconds")


_ALONG = {  # name, title's end, axis, alt's unit
    "step": ("loss-by-step", "steps", "optimizer step", "steps"),
    "seconds": ("loss-by-time", "time", "time since the first loss (s)", "seconds"),
}


def _loss_picture(
    plan: _Plan,
    found: DataFrame,
    along: str,
    said: Sequence[str] = (),
    alt: str = "",
    below: Callable[[Any], None] | None = None,
) -> Picture:
    """The losses, and a second panel that `below` draws."""
    name, against, axis, unit = _ALONG[along]
    lines, breaks = curves.lines(found, along), curves.breaks(found, along)

    def draw(panels: list[Any]) -> None:
        _draw_losses(panels[0], plan, lines, breaks)
        if below is not None:
            below(panels[1])
        panels[-1].set_xlabel(axis)

    said = [_of_losses(plan, lines, bool(breaks)), *said]
    alt = f"Loss against {against}, a line per row, the mean over its seeds. " + " ".join(
        [f"{'; '.join(_from_to(*one, unit) for one in plan.drawn(lines).values())}.", alt]
    )
    heights = [_height(lines), *([1.5] if below else [])]
    return plan.picture(name, f"Training loss against {against}", said, alt, heights, draw)


def _draw_losses(
    axes: Any,
    plan: _Plan,
    lines: dict[str, DataFrame],
    breaks: dict[str, list[tuple[float, float]]],
) -> None:
    drawn = plan.drawn(lines)
    for (row, line), width in zip(drawn.values(), _widths(drawn)):
        label = row.name + quality_mark(row, LOSS)
        axes.plot(line.x, line.y, label=label, lw=width, **plan.line(row))
        _draw_band(axes, plan, row, line)
        for x, y in breaks.get(row.label, ()):
            axes.plot(x, y, "X", ms=8, color=plan.colours[row.opt_level])
    if is_wide(_values(lines)):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("training loss")


def _draw_differences(
    axes: Any, plan: _Plan, near: dict[str, tuple[Row, DataFrame]], own: DataFrame | None
) -> None:
    """The lines of `near`, in front of the scatter of O0's `own` seeds, which sets no limits."""
    axes.axhline(0, color="#000000", lw=0.8)
    for (row, line), width in zip(near.values(), _widths(near)):
        axes.plot(line.x, line.y, lw=0.6 * width, **plan.line(row))
        _draw_band(axes, plan, row, line)
    axes.margins(y=0.15)
    axes.set_ylim(axes.get_ylim())
    if own is not None:
        axes.fill_between(own.x, own.low, own.high, color=GREY, alpha=0.35, lw=0, zorder=0)


def _draw_band(axes: Any, plan: _Plan, row: Row, line: DataFrame) -> None:
    if row.seeds > 1:
        colour = plan.colours[row.opt_level]
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.1, lw=0)


def _scales(plan: _Plan) -> Picture | str | None:
    drawn = plan.drawn(curves.scales(plan.runs))
    if not drawn:
        return None
    if all(line.y.nunique() == 1 for _, line in drawn.values()):
        values = sorted({f"{line.y[0]:g}" for _, line in drawn.values()})
        return f"The loss scale is not drawn: it stayed at {', '.join(values)}."

    def draw(panels: list[Any]) -> None:
        [axes] = panels
        for (row, line), width in zip(drawn.values(), _widths(drawn)):
            axes.step(line.x, line.y, where="post", label=row.name, lw=width, **plan.line(row))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.margins(y=0.15)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss scale")

    alt = "Loss scale over the training of the first seed, a line per row. " + "; ".join(
        f"{row.name}: {line.y.iloc[0]:g} to {line.y.iloc[-1]:g} in {line.x.iloc[-1]:.0f} steps, "
        f"{counted(row.skipped, 'skipped step')}"
        for row, line in drawn.values()
    )
    said = ["The first seed of each row whose loss is scaled. A fall is an overflow."]
    title = "Loss scale against steps"
    return plan.picture("loss-scale", title, said, f"{alt}.", [_height(drawn)], draw)


def _speeds(plan: _Plan) -> Picture | None:
    timed = [row for row in plan.results.rows if row.speeds is not None]
    if all(row.label == BASE.label for row in timed):  # O0 is as fast as itself
        return None
    marks = {row.label: speed_mark(row) + _judged_mark(row) for row in timed}
    drawn = [
        plan.bar(
            row,
            row.speeds.median,
            f"{ratio(row.speeds.median)}x{marks[row.label]}, {row.step_ms:.3g} ms",
            marks[row.label],
            row.speeds,
        )
        for row in timed
    ]

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
        *_of_bars(timed, "".join(marks.values())),
        "The axis is logarithmic; bars begin at 1." if have_wide_axis(drawn) else "",
    ]
    heights = [bars_height(drawn)]
    return plan.picture("speed", "Speed relative to O0", said, f"{alt}.", heights, draw)


def _memory(plan: _Plan) -> Picture | str | None:
    known = [row for row in plan.results.rows if row.memory_bytes is not None]
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
    marks = {row.label: _judged_mark(row) for row in known}
    drawn = [
        plan.bar(row, value, f"{value:.0f} MiB{marks[row.label]}", marks[row.label], None)
        for row, value in zip(known, values)
    ]

    def draw(panels: list[Any]) -> None:
        bars(panels[0], drawn)
        panels[0].set_xlabel("peak memory (MiB)")

    alt = f"Bars of the peak memory ({kind}). " + "; ".join(
        f"{row.name}: {value:.0f} MiB" for row, value in zip(known, values)
    )
    said = [
        f"Memory is {kind}; the largest of a row's runs. 1 MiB is 2^20 bytes.",
        *_of_bars(known, "".join(marks.values())),
    ]
    return plan.picture("memory", "Peak memory", said, f"{alt}.", [bars_height(drawn)], draw)


def _memory_noise(runs: Sequence[Run]) -> float:
    """The largest difference between runs of the same row, in MiB."""
    of_row: dict[str, list[float]] = {}
    for run in runs:
        if run.measured is not None and run.measured.memory_bytes and not run.trial.short:
            of_row.setdefault(run.case.label, []).append(run.measured.memory_bytes / 2**20)
    return max((max(values) - min(values) for values in of_row.values()), default=0.0)


def _judged_mark(row: Row) -> str:
    """The mark of a row whose verdict is that it differs."""
    return quality_mark(row, row.comparisons[0].name) if row.comparisons else ""


def _of_bars(rows: Sequence[Row], marks: str) -> list[str]:
    """What the looks of bars mean, those that are there."""
    names = sorted({row.comparisons[0].name for row in rows if _judged_mark(row)})
    differing = f"{', '.join(names)} {MARKS[DIFFERS]}".replace("_", " ")
    said = {
        f"Striped bars, {NOT_TOLD_APART}: {MARKS[NOT_TOLD_APART]}.": NOT_TOLD_APART in marks,
        f"Dotted bars, {DIFFERS}: {differing}.": DIFFERS in marks,
        "Lighter bars: bfloat16.": any(row.dtype == "bfloat16" for row in rows),
    }
    return [one for one, is_there in said.items() if is_there]


def _of_losses(plan: _Plan, lines: dict[str, DataFrame], breaks: bool) -> str:
    """What lines, bands and marks are."""
    rows = [row for row, _ in plan.drawn(lines).values()]
    seeds = max(row.seeds for row in rows)
    said = {
        "Lines are means over the seeds, and over blocks of steps.": True,
        f"Bands: the range over {seeds} seeds.": seeds > 1,
        f"{DIFFERS}: the {LOSS} {MARKS[DIFFERS]}.": any(quality_mark(row, LOSS) for row in rows),
        "X: a seed's loss became non-finite.": breaks,
    }
    return " ".join(one for one, is_there in said.items() if is_there)


def _of_differences(
    plan: _Plan, lines: dict[str, DataFrame], near: Sequence[str], own: bool, in_percents: bool
) -> str:
    """What the lower panel of the losses shows."""
    several = any(plan.rows[label].seeds > 1 for label in near)
    band = "with the range over the seeds" if several else "of one seed"
    said = f"Below: the difference from O0 at the same step and seed, {band}"
    if in_percents:
        said += ", in percent of O0's line above"
    if lines.keys() - {BASE.label, *near}:
        said += ", for rows whose line lies on O0's"
    if own:
        said += "; grey, cut at the edges: the range of O0's own seeds around their mean"
    return f"{said}."


def _from_to(row: Row, line: DataFrame, unit: str) -> str:
    finite = line.y.dropna()
    ends = f"{finite.iloc[0]:.4g} to {finite.iloc[-1]:.4g}"
    return f"{row.name}: {ends} in {line.x.iloc[-1]:.4g} {unit}"


def _widths(drawn: dict[str, Any]) -> list[float]:
    """Each line thinner than the one before, so that equal lines are all visible."""
    last = max(1, len(drawn) - 1)
    return [2.9 - 1.9 * index / last for index in range(len(drawn))]


def _values(lines: dict[str, DataFrame]) -> list[float]:
    ends = (end for line in lines.values() for end in (*line.low, *line.high))
    return [end for end in ends if not math.isnan(end)]


def _height(lines: dict[str, Any]) -> float:
    """Inches for one panel and the legend."""
    return 2.7 + 0.19 * math.ceil(len(lines) / 2)
