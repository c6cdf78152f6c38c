"""How the figures of docs/ are drawn: marks or bars in rows, as SVG for light and dark pages.

The same values give the same file: no dates, and fixed names inside.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from result_tables import Value

WIDTH = 4.7  # inches: text is legible on a phone, where the figure is as wide as the screen
LEFT, RIGHT, GAP = 1.3, 0.12, 0.34  # inches: names of rows, right margin, between columns
TITLE, AXIS, KEY, LINE = 0.08, 0.3, 0.2, 0.165  # inches: above and below a panel; lines of text
LEGEND = 3  # names in a line
INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"
DARK = {INK: "#e6e9ee", FAINT: "#7d8590", PAPER: "#1e2129"}
"""What each colour becomes where the reader's colour scheme is dark; others suit both."""

STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "svg.hashsalt": "ampatch",
}

Box = tuple[float, float, float, float]
"""Left, bottom, width and height."""


@dataclass(frozen=True)
class Series:
    """What has one colour and one mark, and its name in the legend."""

    name: str
    color: str
    marker: str = "o"
    filled: bool = True


@dataclass(frozen=True)
class Panel:
    """Rows of values by series, along one axis."""

    label: str
    rows: dict[str, dict[str, Value]]  # by the row's name, then by the series'
    title: str = ""
    reference: float | None = None  # a line across all rows
    is_symmetric: bool = False  # the axis goes as far to the left of 0 as to the right
    bands: dict[str, Value] = field(default_factory=dict)  # by row: how far the reference varies
    notes: dict[str, dict[str, str]] = field(default_factory=dict)  # words in place of a value


@dataclass(frozen=True)
class Drawing:
    """A figure: its panels, and what is drawn in each row."""

    panels: Sequence[Panel]
    series: Sequence[Series]
    columns: int = 1
    bars: bool = False
    overlaid: bool = False  # the bars of a row lie on each other: parts of a whole

    def values(self) -> str:
        """Every value that is drawn, a line each."""
        lines = []
        for panel in self.panels:
            for row, values in panel.rows.items():
                band = {"reference again": panel.bands[row]} if row in panel.bands else {}
                for series, value in {**values, **panel.notes.get(row, {}), **band}.items():
                    words = " | ".join(filter(None, [panel.title, row, series, str(value)]))
                    lines.append(" ".join(words.split()))
        return "\n".join(lines)

    def svg(self, title: str) -> str:
        """The picture; it holds its values too, as its description."""
        import matplotlib
        from matplotlib import style

        about = {
            "Title": title,
            "Description": self.values(),
            "Creator": f"matplotlib {matplotlib.__version__}",
            "Date": None,
            "Format": None,
            "Type": None,
        }
        out = io.StringIO()
        with style.context(["default", STYLE]):  # not the user's style
            self._figure().savefig(out, format="svg", metadata=about)
        return _for_both_schemes(out.getvalue())

    def _figure(self) -> Any:
        from matplotlib.figure import Figure  # not pyplot, which has global state

        total, boxes = self._layout()
        figure = Figure(figsize=(WIDTH, total))
        for number, (panel, box) in enumerate(zip(self.panels, boxes)):
            axes = figure.add_axes(box)
            self._draw_rows(axes, panel)
            self._finish(axes, panel, is_first=number % self.columns == 0)
        if self.bars:
            longest = max(axes.get_xlim()[1] for axes in figure.axes)
            for axes in figure.axes:
                axes.set_xlim(0, longest)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="upper center", ncols=LEGEND,
            frameon=False, borderaxespad=0.2, borderpad=0, columnspacing=1.2,
            handletextpad=0.4, labelspacing=0.3,
        )  # fmt: skip
        return figure

    def _layout(self) -> tuple[float, list[Box]]:
        """The figure's height in inches, and each panel's place as parts of the figure."""
        heights = [self._row() * len(panel.rows) for panel in self.panels]
        above = max(TITLE + LINE * _lines([panel.title]) for panel in self.panels)
        below = max(AXIS + LINE * _lines([panel.label]) for panel in self.panels)
        legend = KEY * math.ceil(len(self.series) / LEGEND)
        total = legend + sum(above + below + one for one in heights[:: self.columns])
        width = (WIDTH - LEFT - RIGHT - GAP * (self.columns - 1)) / self.columns
        top, boxes = total - legend, []
        for number, height in enumerate(heights):
            column = number % self.columns
            left = LEFT + column * (width + GAP)
            bottom = top - above - height
            boxes.append((left / WIDTH, bottom / total, width / WIDTH, height / total))
            if column == self.columns - 1:
                top = bottom - below
        return total, boxes

    def _step(self) -> float:
        """From one series to the next in a row, in inches."""
        return 0 if self.overlaid else 0.125 if len(self.series) < 4 else 0.105

    def _row(self) -> float:
        text = LINE * max(_lines(panel.rows) for panel in self.panels)
        return max(self._step() * (len(self.series) - 1) + 0.24, text + 0.06)

    def _draw_rows(self, axes: Any, panel: Panel) -> None:
        for (name, values), center in zip(panel.rows.items(), self._centers(panel)):
            if band := panel.bands.get(name):
                width = band.high - band.low
                axes.barh(center, width, 0.9 * self._row(), band.low, color=FAINT, alpha=0.25, lw=0)
            for number, series in enumerate(self.series):
                place = center + self._step() * (number - (len(self.series) - 1) / 2)
                if value := values.get(series.name):
                    self._mark(axes, place, value, series)
                if note := panel.notes.get(name, {}).get(series.name):
                    self._write(axes, place, note, series)
        for series in self.series:
            self._in_legend(axes, series)

    def _centers(self, panel: Panel) -> list[float]:
        return [(place + 0.5) * self._row() for place in range(len(panel.rows))]

    def _finish(self, axes: Any, panel: Panel, is_first: bool) -> None:
        centers = self._centers(panel)
        axes.set_ylim(len(centers) * self._row(), 0)
        if panel.reference is not None:
            axes.axvline(panel.reference, color=INK, lw=0.8, zorder=0.5)
        if panel.is_symmetric:
            reach = 1.05 * max(map(abs, axes.get_xlim()))
            axes.set_xlim(-reach, reach)
        for center in centers[:-1]:
            axes.axhline(center + self._row() / 2, color=FAINT, lw=0.5, alpha=0.5, zorder=0.4)
        axes.set_yticks(centers, panel.rows if is_first else [""] * len(centers))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlabel(panel.label)
        axes.set_title(panel.title, size=9.5, loc="left")
        axes.locator_params(axis="x", nbins=6 // self.columns + 1)
        axes.xaxis.set_major_formatter("{x:g}")

    def _mark(self, axes: Any, place: float, value: Value, series: Series) -> None:
        if self.bars:
            height = 0.16 if self.overlaid else 0.8 * self._step()
            axes.barh(place, value.middle, height, color=series.color, lw=0)
            return
        if value.low is not None and value.high is not None:
            axes.plot([value.low, value.high], [place] * 2, color=series.color, lw=1.4)
        axes.plot(value.middle, place, **_look(series))

    def _write(self, axes: Any, place: float, note: str, series: Series) -> None:
        axes.text(
            0.5, place, note, size=8, va="center", ha="center", color=series.color,
            transform=axes.get_yaxis_transform(), bbox={"fc": PAPER, "ec": "none", "pad": 0.5},
        )  # fmt: skip

    def _in_legend(self, axes: Any, series: Series) -> None:
        if self.bars:
            axes.barh(0, 0, 0, color=series.color, lw=0, label=series.name)
        else:
            axes.plot([], [], label=series.name, **_look(series))


def _lines(texts: Iterable[str]) -> int:
    """Of the longest text, in lines."""
    return max((len(text.splitlines()) for text in texts), default=0)


def _look(series: Series) -> dict[str, Any]:
    inside = series.color if series.filled else PAPER
    return {"ls": "none", "marker": series.marker, "ms": 5, "mec": series.color, "mfc": inside}


def _for_both_schemes(svg: str) -> str:
    """Colours by the reader's colour scheme, so that a page's dark mode reaches its figures."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"  <style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n"
    return svg.replace("</defs>\n", f"{style} </defs>\n", 1)
