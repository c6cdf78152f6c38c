"""How a picture is drawn by matplotlib and saved: as SVG and PDF for a paper, as PNG.

The same data give the same bytes: no dates, and fixed names inside an SVG.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FORMATS = ("svg", "pdf", "png")
WIDTH, DPI = 4.6, 240  # inches: legible in a column of a paper and on a phone
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "grid.alpha": 0.25,
    "hatch.linewidth": 1.2,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "legend.handlelength": 3.0,
    "pdf.fonttype": 42,  # TrueType; some publishers refuse type 3
    "svg.hashsalt": "ampatch",
    "text.parse_math": False,  # names of rows may have a $
}


def saved(
    draw: Callable[[list[Any]], None], heights: Sequence[float], title: str, about: str
) -> dict[str, bytes]:
    """What `draw` draws on panels of these heights in inches, by format; lines get a legend.

    `about` is what a file says of itself besides its `title`.
    """
    from matplotlib import style
    from matplotlib.figure import Figure  # not pyplot, which has global state

    with style.context(["default", STYLE]):  # not the user's style
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        grid = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
        draw([axes for (axes,) in grid])
        handles, labels = grid[0, 0].get_legend_handles_labels()
        if labels:
            columns = 1 if max(map(len, labels)) > 28 else 2
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, for all formats
        described = {
            "svg": {"Title": title, "Description": about, "Date": None},
            "pdf": {"Title": title, "Subject": about, "CreationDate": None},
            "png": {"Title": title, "Description": about},
        }
        return {form: _bytes(figure, form, described[form]) for form in FORMATS}


def _bytes(figure: Any, form: str, metadata: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def is_wide(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis."""
    return min(values) > 0 and max(values) > 50 * min(values)


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with a text beside it; `low` and `high` are the ends of its whisker."""

    name: str
    value: float
    text: str
    low: float
    high: float
    colour: Any = "black"
    hatch: str = ""


def have_wide_axis(drawn: Sequence[Bar]) -> bool:
    """Whether `bars` draws them on a logarithmic axis."""
    return is_wide([end for bar in drawn for end in (bar.low, bar.high)])


def bars(axes: Any, drawn: Sequence[Bar]) -> None:
    """The bars, the first on top, with their texts in a column on the right.

    Numbers that are far apart have a logarithmic axis, on which bars begin at 1.
    """
    start = 1 if have_wide_axis(drawn) else 0
    if start:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    reach = [[bar.value - bar.low for bar in drawn], [bar.high - bar.value for bar in drawn]]
    places = range(len(drawn))
    axes.barh(
        places, [bar.value - start for bar in drawn], left=start, height=0.6,
        color=[bar.colour for bar in drawn], edgecolor="white", linewidth=0,
        hatch=[bar.hatch for bar in drawn], xerr=reach if any(map(any, reach)) else None,
        error_kw={"ecolor": "#666666", "elinewidth": 1, "capsize": 2.5},
    )  # fmt: skip
    axes.set_yticks(places, [bar.name for bar in drawn])
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    texts = axes.secondary_yaxis("right")
    texts.set_yticks(places, [bar.text for bar in drawn])
    texts.tick_params(length=0)
    texts.spines["right"].set_visible(False)


def bars_height(drawn: Sequence[Bar]) -> float:
    """Inches for the bars and one axis below them."""
    return 0.9 + sum(0.12 + 0.17 * (bar.name.count("\n") + 1) for bar in drawn)
