"""Draws the figures of docs/ from committed results, and writes them and a table into the pages.

    python benchmarks/run.py figures

A page has two comments where a figure stands: `<!-- figure NAME -->`, `<!-- end of figure -->`; a
table has `table` instead.  What is between them and the SVG files in docs/images/ are made here; no
number is typed in.  A test compares both with the results.  To draw again after a new measurement:
this command.
"""

from __future__ import annotations

import io
import re
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from measuring import table
from result_tables import WHERE, Results, Value

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
PLACE = re.compile(r"(<!-- (figure|table) (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
TIMED = r"^(\w+, CPU, one thread: median and quartiles of \d+ interleaved rounds), "

WIDTH = 4.7  # inches: text is legible on a phone, where the figure is as wide as the screen
STEP, LINE = 0.12, 0.17  # inches from one series to the next in a row; a line of text
INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"
DARK = {INK: "#e6e9ee", FAINT: "#7d8590", PAPER: "#1e2129"}
"""What each colour becomes where the reader's colour scheme is dark; others suit both."""
BLUE, ORANGE, GREEN, GREY = "#3d85c6", "#d9772b", "#2f9e6b", "#848d97"
STYLE = {
    **{"font.size": 9.5, "axes.titlesize": 9.5, "axes.titlelocation": "left"},
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), FAINT),
    **{"axes.facecolor": "none", "figure.facecolor": PAPER, "svg.hashsalt": "ampatch"},
}


class Series(NamedTuple):
    """What has one colour and one mark, and its name in the legend."""

    name: str
    color: str
    marker: str = "o"
    filled: bool = True

    def look(self) -> dict[str, Any]:
        inside = self.color if self.filled else PAPER
        return {"fmt": self.marker, "ms": 5, "color": self.color, "mfc": inside, "elinewidth": 1.4}


LEVELS = [
    Series("FP32", GREY, "D"),
    Series("O1", BLUE, "o", filled=False),
    Series("O1 native", BLUE),
    Series("O2", ORANGE, "s", filled=False),
    Series("O2 native", ORANGE, "s"),
    Series("O3", GREEN, "^"),
]
SYSTEMS = ("autocast again", *(series.name for series in LEVELS))
HALF_DTYPES = [Series("float16", ORANGE), Series("bfloat16", BLUE, "s")]


@dataclass(frozen=True)
class Panel:
    """Rows of values by series, along one axis."""

    label: str
    rows: dict[str, dict[str, Value]]  # by the row's name, then by the series'
    reference: float  # a line across all rows
    title: str = ""
    bands: dict[str, Value] = field(default_factory=dict)  # by row: how far the reference varies
    notes: dict[str, dict[str, str]] = field(default_factory=dict)  # words in place of a value

    def values(self) -> Iterator[str]:
        """Every value that is drawn, a line each."""
        for row, values in self.rows.items():
            band = {"reference again": self.bands[row]} if row in self.bands else {}
            for series, value in {**values, **self.notes.get(row, {}), **band}.items():
                words = " | ".join(filter(None, [self.title, row, series, str(value)]))
                yield " ".join(words.split())


@dataclass(frozen=True)
class Figure:
    """A drawing with the words that belong to it."""

    name: str
    panels: list[Panel]
    series: list[Series]
    alt: str
    caption: str  # what was measured, how often, on what and when
    results: Results
    columns: int = 1

    def block(self, page: Path) -> str:
        """Picture and caption, in Markdown, for a page in docs/."""
        docs = "../" * (len(page.relative_to(DOCS).parts) - 1)
        picture = f"![{self.alt}]({docs}images/{self.name}.svg)"
        file = self.results.path.relative_to(DOCS.parent)
        is_page = DOCS in self.results.path.parents
        source = "the tables of this page" if is_page else f"[{file}]({docs}../{file})"
        where = self.results.says(WHERE)
        caption = f"*{self.caption} {where}. Drawn by `benchmarks/run.py figures` from {source}.*"
        wrapped = (
            textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
            for text in (picture, caption)
        )
        return "\n" + "\n\n".join(wrapped) + "\n\n"

    def values(self) -> str:
        """Every value that is drawn, a line each."""
        return "\n".join(line for panel in self.panels for line in panel.values())

    def svg(self) -> str:
        """The picture; it holds its values too.  The same values give the same file."""
        import matplotlib
        from matplotlib import style

        about = {
            **{"Title": self.alt, "Description": self.values(), "Date": None},
            **{"Creator": f"matplotlib {matplotlib.__version__}", "Format": None, "Type": None},
        }
        out = io.StringIO()
        with style.context(["default", STYLE]):  # not the user's style
            self._drawn().savefig(out, format="svg", metadata=about)
        return _for_both_schemes(out.getvalue())

    def _drawn(self) -> Any:
        from matplotlib.figure import Figure  # not pyplot, which has global state

        names = list(self.panels[0].rows)
        lines = max(len(name.splitlines()) for name in names)
        row = max(STEP * len(self.series) + 0.12, LINE * lines + 0.06)
        high = len(self.panels) // self.columns
        around = 0.55 + LINE * len(self.panels[0].title.splitlines())
        size = (WIDTH, 0.25 + high * (around + row * len(names)))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(high, self.columns, sharey=True, squeeze=False)
        for panel, axes in zip(self.panels, grid.flat):
            self._draw(axes, panel, STEP / row)
        known = dict(zip(*reversed(grid.flat[0].get_legend_handles_labels())))
        figure.legend(
            known.values(), known, loc="outside upper center", ncols=3, frameon=False,
            columnspacing=1.2, handletextpad=0.4, labelspacing=0.3,
        )  # fmt: skip
        return figure

    def _draw(self, axes: Any, panel: Panel, step: float) -> None:
        for center, (name, values) in enumerate(panel.rows.items()):
            if band := panel.bands.get(name):
                axes.barh(center, band.high - band.low, 0.9, band.low, color=FAINT, alpha=0.25)
            for number, series in enumerate(self.series):
                place = center + step * (number - (len(self.series) - 1) / 2)
                if value := values.get(series.name):
                    low, high = value.low, value.high
                    has_ends = low is not None and high is not None
                    ends = [[value.middle - low], [high - value.middle]] if has_ends else None
                    axes.errorbar(
                        value.middle, place, xerr=ends, label=series.name, **series.look()
                    )
                if note := panel.notes.get(name, {}).get(series.name):
                    box = {"fc": PAPER, "ec": "none", "pad": 0}
                    axes.text(
                        0.5, place, note, size=8, va="center", ha="center", color=series.color,
                        transform=axes.get_yaxis_transform(), bbox=box,
                    )  # fmt: skip
            axes.axhline(center + 0.5, color=FAINT, lw=0.5, alpha=0.5, zorder=0.4)
        axes.set_ylim(len(panel.rows) - 0.5, -0.5)
        axes.axvline(panel.reference, color=INK, lw=0.8, zorder=0.5)
        if panel.reference == 0:  # differences: the axis goes as far to the left as to the right
            reach = 1.05 * max(map(abs, axes.get_xlim()))
            axes.set_xlim(-reach, reach)
        axes.set_yticks(range(len(panel.rows)), list(panel.rows))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set(xlabel=panel.label, title=panel.title)
        axes.locator_params(axis="x", nbins=6 // self.columns + 1)
        axes.xaxis.set_major_formatter("{x:g}")


def _for_both_schemes(svg: str) -> str:
    """Colours by the reader's colour scheme, so that a page's dark mode reaches its figures."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"  <style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n"
    return svg.replace("</defs>\n", f"{style} </defs>\n", 1)


def small_steps() -> Figure:
    """Speed of small models."""
    return _speed("small", "Training, ordinary optimizer, dispatch-bound")


def large_steps() -> Figure:
    """Speed of compute-bound models."""
    return _speed("large", "Training, compute-bound")


def _speed(size: str, heading: str) -> Figure:
    results, title = Results.newest("speed"), f"{size.title()} steps"
    speeds = {
        textwrap.fill(row[""], 16): {name: Value.of(cell) for name, cell in row.items() if name}
        for row in results.tables()[heading]
    }
    shown = [series.name for series in LEVELS]
    of_all = speeds["geometric mean"]
    means = ", ".join(f"{system} {of_all[system].middle:.2f}" for system in shown)
    panel = Panel(
        "speed-up over autocast + GradScaler",
        {row: {name: values[name] for name in shown} for row, values in speeds.items()},
        reference=1,
        bands={row: v["autocast again"] for row, v in speeds.items() if v is not of_all},
    )
    return Figure(
        f"speed_{size}_steps",
        [panel],
        LEVELS,
        f"{title}: speed-ups over autocast + GradScaler by model. Geometric means: {means}.",
        f"{title}: speed-up of a training step over autocast + GradScaler; right of 1 is faster. "
        f"Measured in {results.says(TIMED)}; the grey band is autocast measured again. Native: "
        "with the native part.",
        results,
    )


def speed_means() -> str:
    """The means of each table beside autocast in the newest results; in brackets its models."""
    rows = []
    for heading, (*models, means) in Results.newest("speed").tables().items():
        if SYSTEMS[0] not in means:
            continue
        rows.append([f"{heading} ({len(models)})", *(means.get(name, "") for name in SYSTEMS)])
    return f"\n{table(['', *SYSTEMS], rows)}\n"


def accuracy() -> Figure:
    """How far each level's metric is from O0's, by task."""
    results = Results(DOCS / "accuracy.md")
    tasks = {heading: rows for heading, rows in results.tables().items() if "verdict" in rows[0]}
    levels = {_named(row)[0]: None for rows in tasks.values() for row in rows[1:]}
    order = sorted(levels, key=lambda level: (level == "autocast", level))
    runs = results.says(r"^Runs per row: (\d+)")
    diverged = [
        f"{next(iter(row.values()))} on {heading.partition(':')[0]}"
        for heading, rows in tasks.items()
        for row in rows
        if "diverged" in row["verdict"]
    ]
    return Figure(
        "accuracy",
        [_task(heading, rows, order) for heading, rows in tasks.items()],
        HALF_DTYPES,
        "Held-out results of O1, O2, O3 and torch.autocast less those of O0, with 95 % intervals, "
        f"on {len(tasks)} tasks. Diverged: {'; '.join(diverged)}.",
        f"Held-out result less that of O0 (FP32): difference of means and 95 % interval of Welch's "
        f"test, {runs} seeds per row; above each panel O0's mean and standard deviation. One "
        "thread of a CPU.",
        results,
        columns=2,
    )


def _task(heading: str, rows: list[dict[str, str]], levels: list[str]) -> Panel:
    reference, *others = rows
    metric = next(iter(reference)).removeprefix("held-out ")
    values: dict[str, dict[str, Value]] = {level: {} for level in levels}
    notes = {level: {"float16": "not run"} for level in levels}
    for row in others:
        level, half = _named(row)
        notes[level].pop("float16", None) if half == "float16" else None
        if difference := row["less O0 (95 % interval)"]:
            values[level][half] = Value.of(difference)
        else:
            notes[level][half] = "diverged"
    return Panel(
        f"{metric}\n({'lower' if 'loss' in metric else 'higher'} is better)",
        values,
        reference=0,
        title=f"{heading.partition(':')[0]}\nO0: {reference['mean']}, s.d. {reference['s.d.']}",
        notes=notes,
    )


def _named(row: dict[str, str]) -> tuple[str, str]:
    """`O3 float16, eps=0.001` is the level `O3, eps=0.001` in float16."""
    title = next(iter(row.values()))
    half = "bfloat16" if "bfloat16" in title else "float16"
    level = title.replace(f" {half}", "").removeprefix("torch.").removesuffix(" + GradScaler")
    return level, half


FIGURES: dict[str, Callable[[], Figure]] = {
    "speed_small_steps": small_steps,
    "speed_large_steps": large_steps,
    "accuracy": accuracy,
}
TABLES: dict[str, Callable[[], str]] = {"speed_means": speed_means}


def completed(page: Path) -> str:
    """A page's text with each figure and table that it asks for."""

    def filled(place: re.Match[str]) -> str:
        begin, kind, name, end = place.groups()
        text = TABLES[name]() if kind == "table" else FIGURES[name]().block(page)
        return f"{begin}{text}{end}"

    return PLACE.sub(filled, page.read_text(encoding="utf-8"))


def report(options: Namespace) -> Iterator[str]:
    """Draw every figure, and complete every page."""
    for name, make in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(make().svg(), encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md")):
        if (new := completed(path)) != path.read_text(encoding="utf-8"):
            path.write_text(new, encoding="utf-8")
            yield f"wrote {path.relative_to(DOCS.parent)}"
