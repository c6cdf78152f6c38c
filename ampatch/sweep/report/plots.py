"""The pictures of a sweep, drawn by matplotlib: losses, speed, memory, loss scale.

A row has the same colour and dashes in every picture.  Colours are opt levels, chosen
for colour-blind readers (Okabe and Ito, "Color Universal Design", 2008, without yellow,
which is hard to see on white).  Dashes are dtypes.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.curves import Curve, loss_curves, scale_curves
from ampatch.sweep.report.results import Results, Row

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = {"float32": "-", "float16": "-", "bfloat16": (0, (4, 1.5))}
WIDTH, DPI = 5.6, 200  # inches: legible on a phone
MISSING = (
    "No plots: matplotlib is not installed. pip install matplotlib, or pip install "
    "ampatch[sweep]; then `ampatch report DIR` draws them."
)


@dataclass(frozen=True)
class Picture:
    """A PNG; `alt` describes it in words."""

    name: str  # of the file, without ".png"
    title: str
    alt: str
    png: bytes


@dataclass(frozen=True)
class Style:
    """The colours and dashes of rows."""

    colours: dict[str, str]  # by opt level

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Style:
        levels = dict.fromkeys(row.opt_level for row in rows)
        return cls(dict(zip(levels, itertools.cycle(COLOURS))))

    def line(self, row: Row) -> dict[str, Any]:
        return {"color": self.colours[row.opt_level], "linestyle": DASHES.get(row.dtype, "-")}


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def pictures(results: Results, runs: Sequence[Run]) -> list[Picture]:
    """The pictures for which there is something to draw.  Needs matplotlib."""
    from matplotlib import style as styles

    rows, style = results.rows, Style.of(results.rows)
    with styles.context("default"):  # not the user's style
        drawn = [
            _losses(loss_curves(rows, runs, by_time=False), style, by_time=False),
            _losses(loss_curves(rows, runs, by_time=True), style, by_time=True),
            _speeds(rows, style),
            _memory(rows, style),
            _scales(scale_curves(rows, runs), style),
        ]
    return [picture for picture in drawn if picture is not None]


def _losses(curves: Sequence[Curve], style: Style, by_time: bool) -> Picture | None:
    if not curves:
        return None
    against = "time" if by_time else "step"

    def draw(axes: Any) -> None:
        for curve, width in _widths(curves):
            axes.plot(curve.x, curve.y, label=_text(curve.name), lw=width, **style.line(curve.row))
            if curve.row.seeds > 1:
                colour = style.colours[curve.row.opt_level]
                axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.1, lw=0)
            for x, y in curve.breaks:
                axes.plot(x, y, "X", ms=9, color=style.colours[curve.row.opt_level])
        if _spans_magnitudes(curves):
            _magnitudes(axes, base=10, subs=(1, 2, 5))
        axes.set_xlabel("time since the first loss, s" if by_time else "optimizer step")
        axes.set_ylabel("training loss")

    title = f"Loss against {against}"
    seeds = " Bands: least to greatest seed." if any(c.row.seeds > 1 for c in curves) else ""
    marks = " X: a seed's loss became non-finite." if any(c.breaks for c in curves) else ""
    unit = "seconds" if by_time else "steps"
    alt = (
        f"{title}, a line per row, the mean over its seeds. "
        + "; ".join(f"{c.name}: {_from_to(c)} {c.x[-1]:.4g} {unit}" for c in curves)
        + f".{seeds}{marks}"
    )
    return Picture(f"loss-by-{against}", title, alt, _lined(draw, len(curves)))


def _scales(curves: Sequence[Curve], style: Style) -> Picture | None:
    if not curves:
        return None

    def draw(axes: Any) -> None:
        for curve, width in _widths(curves):
            axes.step(
                curve.x, curve.y, where="post", label=_text(curve.name), lw=width,
                **style.line(curve.row),
            )  # fmt: skip
        _magnitudes(axes, base=2)
        axes.margins(y=0.15)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss scale")

    alt = "Loss scale over the training of the first seed, a line per row. " + "; ".join(
        f"{c.name}: {c.y[0]:g} to {c.y[-1]:g} in {c.x[-1]:.0f} steps, "
        f"{_plural(c.row.skipped, 'skipped step')}"
        for c in curves
    )
    return Picture("loss-scale", "Loss scale over time", alt + ".", _lined(draw, len(curves)))


def _speeds(rows: Sequence[Row], style: Style) -> Picture | None:
    timed = [row for row in rows if row.speeds is not None]
    if not timed:
        return None

    def draw(axes: Any) -> None:
        reach = [
            [row.speeds.median - row.speeds.low for row in timed],
            [row.speeds.high - row.speeds.median for row in timed],
        ]
        values = [row.speeds.median for row in timed]
        texts = [f"{row.speeds.median:.2f}x, {row.step_ms:.3g} ms" for row in timed]
        _bars(axes, timed, values, texts, style, reach)
        axes.axvline(1, color="#555555", lw=1, ls=":")
        axes.set_xlabel("speed relative to O0\n(beside the bars: time per step)")

    alt = "Bars of the speed relative to O0. " + "; ".join(
        f"{row.name}: {row.speeds.median:.2f} times O0's, "
        f"{row.speeds.low:.2f} to {row.speeds.high:.2f} over {_plural(row.speeds.n, 'round')}"
        for row in timed
    )
    return Picture("speed", "Speed", alt + ".", _barred(draw, timed))


def _memory(rows: Sequence[Row], style: Style) -> Picture | None:
    known = [row for row in rows if row.memory_bytes is not None]
    if not known:
        return None
    values = [row.memory_bytes / 2**20 for row in known]
    on_device = known[0].memory_kind == "device"
    kind = "allocated on the device" if on_device else "resident, PyTorch included"

    def draw(axes: Any) -> None:
        _bars(axes, known, values, [f"{value:.0f}" for value in values], style)
        axes.set_xlabel(f"peak memory, MiB\n({kind})")

    alt = f"Bars of the peak memory ({kind}). " + "; ".join(
        f"{row.name}: {value:.0f} MiB" for row, value in zip(known, values)
    )
    return Picture("memory", "Peak memory", alt + ".", _barred(draw, known))


def _bars(
    axes: Any,
    rows: Sequence[Row],
    values: Sequence[float],
    texts: Sequence[str],
    style: Style,
    reach: Any = None,
) -> None:
    """Horizontal bars, the first row on top, with figures beside them."""
    places = range(len(rows))
    colours = [style.colours[row.opt_level] for row in rows]
    bars = {"error_kw": {"ecolor": "#777777"}, "capsize": 3, "height": 0.6}
    axes.barh(places, values, color=colours, xerr=reach, **bars)
    ends = values if reach is None else [value + up for value, up in zip(values, reach[1])]
    for place, end, text in zip(places, ends, texts):
        axes.annotate(
            text, (end, place), (5, 0), textcoords="offset points", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axes.set_yticks(places, list(map(_wrapped, rows)))
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set_xlim(0, max(ends) * 1.4)


def _wrapped(row: Row) -> str:
    return _text(textwrap.fill(row.name, 28, break_long_words=False))


def _barred(draw: Callable[[Any], None], rows: Sequence[Row]) -> bytes:
    lines = max(_wrapped(row).count("\n") + 1 for row in rows)
    return _png(draw, height=1.3 + (0.22 + 0.2 * lines) * len(rows), legend=False)


def _lined(draw: Callable[[Any], None], lines: int) -> bytes:
    return _png(draw, height=3.4 + 0.25 * math.ceil(lines / 2), legend=True)


def _png(draw: Callable[[Any], None], height: float, legend: bool) -> bytes:
    from matplotlib.figure import Figure  # not pyplot, which has global state

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    draw(axes)
    if legend:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _widths(curves: Sequence[Curve]) -> list[tuple[Curve, float]]:
    """Each line thinner than the one before, so that equal lines are all visible."""
    last = max(1, len(curves) - 1)
    return [(curve, 3.4 - 2.2 * index / last) for index, curve in enumerate(curves)]


def _magnitudes(axes: Any, base: int, subs: Sequence[float] = (1,)) -> None:
    """Make the axis logarithmic, with plain numbers."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_locator(LogLocator(base, subs=subs))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _spans_magnitudes(curves: Sequence[Curve]) -> bool:
    values = [y for curve in curves for y in curve.low + curve.high if not math.isnan(y)]
    return min(values) > 0 and max(values) > 50 * min(values)


def _from_to(curve: Curve) -> str:
    finite = [y for y in curve.y if not math.isnan(y)]
    return f"{finite[0]:.4g} to {finite[-1]:.4g} in"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _text(text: str) -> str:
    """Text without formulas: matplotlib reads `$` as the start of one."""
    return text.replace("$", r"\$")
