"""How a picture is drawn by matplotlib and saved: as SVG and PDF for a paper, as PNG.

The same data give the same bytes: no dates, and fixed names inside an SVG.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampatch.sweep.report.curves import Curve

FORMATS = ("svg", "pdf", "png")
WIDTH, DPI = 4.6, 240  # inches: legible in a column of a paper and on a phone
DECADES = 2  # an axis over so many powers of ten has a label at each, and at nothing else
_STYLE = {
    "font.size": 9.0,
    "legend.fontsize": 8.0,
    "pdf.fonttype": 42,  # TrueType; some publishers refuse type 3
    "svg.hashsalt": "ampatch",
}


@dataclass(frozen=True)
class Origin:
    """What a file says of itself besides its picture."""

    title: str
    caption: str
    provenance: str

    def metadata(self, form: str) -> dict[str, str | None]:
        """In the words of the format; None leaves out what would change with each run."""
        if form == "pdf":
            about = {"Title": self.title, "Subject": self.caption, "Keywords": self.provenance}
            return {**about, "Creator": None, "Producer": None, "CreationDate": None}
        described = f"{self.caption} {self.provenance}"
        about = {"Title": self.title, "Description": described}
        if form == "svg":
            return {**about, "Creator": None, "Date": None, "Format": None, "Type": None}
        return {**about, "Software": None}


@dataclass(frozen=True)
class Sheet:
    """A figure to draw on: its height, its panels from the top, and whether it has a legend."""

    height: float  # inches
    legend: bool = False
    panels: Sequence[float] = field(default=(1.0,))  # heights relative to each other

    def saved(self, draw: Callable[[list[Any]], None], origin: Origin) -> dict[str, bytes]:
        """What `draw` draws on the panels, by format."""
        from matplotlib import style

        with style.context(["default", _STYLE]):  # not the user's style
            figure = self._figure(draw)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once, for all formats
            return {form: _saved(figure, form, origin) for form in FORMATS}

    def _figure(self, draw: Callable[[list[Any]], None]) -> Any:
        from matplotlib.figure import Figure  # not pyplot, which has global state

        figure = Figure(figsize=(WIDTH, self.height), layout="constrained")
        grid = figure.subplots(
            len(self.panels), sharex=True, squeeze=False, height_ratios=list(self.panels)
        )
        panels = [axes for (axes,) in grid]
        for axes in panels:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
        draw(panels)
        if self.legend:
            handles, labels = panels[0].get_legend_handles_labels()
            columns = 1 if max(map(len, labels)) > 28 else 2
            figure.legend(
                handles, labels, loc="outside lower center", ncols=columns, frameon=False,
                handlelength=3,
            )  # fmt: skip
        return figure


def _saved(figure: Any, form: str, origin: Origin) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=DPI, metadata=origin.metadata(form))
    return buffer.getvalue()


def is_wide(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis."""
    return min(values) > 0 and max(values) > 50 * min(values)


def logarithmic(axes: Any, values: Sequence[float], along: str = "y") -> None:
    """A logarithmic axis, "x" or "y": powers of ten on a wide one, plain numbers on another."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set(**{f"{along}scale": "log"})
    axis = getattr(axes, f"{along}axis")
    if math.log10(max(values) / min(values)) < DECADES:
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
    else:
        axis.set_major_locator(LogLocator(10, numticks=8))
        axis.set_minor_locator(LogLocator(10, subs=range(2, 10), numticks=100))
    axis.set_minor_formatter(NullFormatter())


def powers_of_two(axes: Any) -> None:
    """A logarithmic axis with labels such as 2^16."""
    from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullFormatter

    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(2, numticks=8))
    axes.yaxis.set_major_formatter(LogFormatterMathtext(2))
    axes.yaxis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with a text beside it; `low` and `high` are the ends of its whisker."""

    name: str
    value: float
    text: str
    look: dict[str, Any]
    low: float | None = None
    high: float | None = None


def bars(axes: Any, drawn: Sequence[Bar]) -> None:
    """The bars, the first on top, with their texts in a column on the right.

    Numbers that are far apart have a logarithmic axis, on which bars begin at 1.
    """
    is_log, ends = have_wide_axis(drawn), _ends(drawn)
    start = 1 if is_log else 0
    for place, bar in enumerate(drawn):
        axes.barh(place, bar.value - start, left=start, height=0.6, **bar.look)
        if bar.low is not None and bar.high is not None:
            reach = [[bar.value - bar.low], [bar.high - bar.value]]
            style = {"ecolor": "#666666", "elinewidth": 1, "capsize": 2.5}
            axes.errorbar(bar.value, place, xerr=reach, fmt="none", **style)
    places = range(len(drawn))
    axes.set_yticks(places, [plain(bar.name) for bar in drawn])
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    if is_log:
        logarithmic(axes, [*ends, 1], "x")
        axes.set_xlim(min(*ends, 1) / 1.2, max(*ends, 1) * 1.2)
    else:
        axes.set_xlim(0, 1.06 * max(ends))
    texts = axes.secondary_yaxis("right")
    texts.set_yticks(places, [plain(bar.text) for bar in drawn])
    texts.tick_params(length=0)
    texts.spines["right"].set_visible(False)


def have_wide_axis(drawn: Sequence[Bar]) -> bool:
    """Whether `bars` draws them on a logarithmic axis."""
    return is_wide(_ends(drawn))


def _ends(drawn: Sequence[Bar]) -> list[float]:
    ends = [end for bar in drawn for end in (bar.value, bar.low, bar.high)]
    return [end for end in ends if end is not None]


def bars_height(drawn: Sequence[Bar]) -> float:
    """Inches for the bars and one axis below them."""
    return 0.9 + sum(0.12 + 0.17 * (bar.name.count("\n") + 1) for bar in drawn)


def widths(curves: Sequence[Curve]) -> list[tuple[Curve, float]]:
    """Each line thinner than the one before, so that equal lines are all visible."""
    last = max(1, len(curves) - 1)
    return [(curve, 2.9 - 1.9 * index / last) for index, curve in enumerate(curves)]


def plain(text: str) -> str:
    """Text without formulas: matplotlib reads `$` as the start of one."""
    return text.replace("$", r"\$")
