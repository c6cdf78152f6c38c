"""Draws the figures of docs/ from committed results, and writes their captions into the pages.

    python benchmarks/run.py figures

A page has two comments where a figure stands: `<!-- figure NAME -->`, `<!-- end of figure -->`.
What is between them and the SVG files in docs/images/ are made here; no number is typed in.  A test
compares both with the results.  To draw again after a new measurement: this command.
"""

from __future__ import annotations

import re
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from figure_drawing import Drawing, Panel, Series
from result_tables import Results, Value

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
PLACE = re.compile(r"(<!-- figure (\w+) -->\n).*?(<!-- end of figure -->)", re.DOTALL)

BLUE, ORANGE, GREEN, GREY, PURPLE = "#3d85c6", "#d9772b", "#2f9e6b", "#848d97", "#a371c9"
LEVELS = [
    Series("FP32", GREY, "D"),
    Series("O1", BLUE, "o", filled=False),
    Series("O1 native", BLUE),
    Series("O2", ORANGE, "s", filled=False),
    Series("O2 native", ORANGE, "s"),
    Series("O3", GREEN, "^"),
]
HALF_TYPES = [Series("float16", ORANGE), Series("bfloat16", BLUE, "s")]
IN_MEMORY = [
    Series("FP32", GREY),
    Series("O1", BLUE),
    Series("O2", ORANGE),
    Series("O3", GREEN),
    Series("pure half", PURPLE),
]
AT_REST, PEAK = "at rest", "peak of a step"
OF_A_RANK = [Series(PEAK, "#a9c4de"), Series(AT_REST, BLUE)]
"""In the order in which they are drawn: the first is the longer."""

TIMED = r"^(\w+, CPU, one thread: median and quartiles of \d+ interleaved rounds), "


@dataclass(frozen=True)
class Figure:
    """A drawing with the words that belong to it."""

    name: str
    drawing: Drawing
    alt: str
    caption: str  # what was measured, how often, on what and when
    source: Path

    def block(self, page: Path) -> str:
        """Picture and caption, in Markdown, for a page in docs/."""
        docs = "../" * (len(page.relative_to(DOCS).parts) - 1)
        picture = f"![{self.alt}]({docs}images/{self.name}.svg)"
        file = self.source.relative_to(DOCS.parent)
        is_page = DOCS in self.source.parents
        source = "the tables of this page" if is_page else f"[{file}]({docs}../{file})"
        caption = f"*{self.caption} Drawn by `benchmarks/run.py figures` from {source}.*"
        return f"\n{_wrapped(picture)}\n\n{_wrapped(caption)}\n\n"

    def svg(self) -> str:
        """The picture."""
        return self.drawing.svg(self.alt)


def small_steps() -> Figure:
    """Speed of small models."""
    table = "Training, ordinary optimizer, dispatch-bound"
    return _speed("speed_small_steps", "Small steps", Results.newest("native"), table)


def large_steps() -> Figure:
    """Speed of compute-bound models."""
    table = "Training, compute-bound"
    return _speed("speed_large_steps", "Large steps", Results.newest("compute-bound"), table)


def speed_ups(found: Results, table: str) -> dict[str, dict[str, Value]]:
    """A table's rows by name, and of each the speed-ups by column."""
    return {row[""]: _values(row) for row in found.tables()[table]}


def _speed(name: str, title: str, found: Results, table: str) -> Figure:
    speeds = speed_ups(found, table)
    shown = [series.name for series in LEVELS]
    means = ", ".join(f"{one} {speeds['geometric mean'][one].middle:.2f}" for one in shown)
    panel = Panel(
        "speed-up over autocast + GradScaler",
        {_broken(row): _only(shown, values) for row, values in speeds.items()},
        reference=1,
        bands={
            _broken(row): again
            for row, values in speeds.items()
            if (again := values["autocast again"]).low is not None
        },
    )
    return Figure(
        name,
        Drawing([panel], LEVELS),
        f"{title}: speed-ups over autocast + GradScaler by model. Geometric means: {means}.",
        f"{title}: speed-up of a training step over autocast + GradScaler; right of 1 is faster. "
        f"Measured in {found.says(TIMED)}; the grey band is autocast measured again. Native: with "
        f"the native part. {found.where}.",
        found.path,
    )


def accuracy() -> Figure:
    """How far each level's metric is from O0's, by task."""
    found = Results(DOCS / "accuracy.md")
    tasks = {heading: rows for heading, rows in found.tables().items() if "verdict" in rows[0]}
    levels = {row_name(_title(row))[0]: None for rows in tasks.values() for row in rows[1:]}
    order = sorted(levels, key=lambda level: (level == "autocast", level))
    panels = [_task(heading, rows, order) for heading, rows in tasks.items()]
    runs = found.says(r"^Runs per row: (\d+)")
    diverged = [
        f"{_title(row)} on {heading.partition(':')[0]}"
        for heading, rows in tasks.items()
        for row in rows
        if "diverged" in row["verdict"]
    ]
    return Figure(
        "accuracy",
        Drawing(panels, HALF_TYPES, columns=2),
        "Held-out results of O1, O2, O3 and torch.autocast less those of O0, with 95 % intervals, "
        f"on {len(tasks)} tasks. Diverged: {'; '.join(diverged)}.",
        f"Held-out result less that of O0 (FP32): difference of means and 95 % interval of Welch's "
        f"test, {runs} seeds per row; above each panel O0's mean and standard deviation. One "
        f"thread of a CPU. {found.where}.",
        found.path,
    )


def _task(heading: str, rows: list[dict[str, str]], levels: list[str]) -> Panel:
    reference, *others = rows
    metric = next(iter(reference))
    name, _, _ = heading.partition(":")
    values: dict[str, dict[str, Value]] = {level: {} for level in levels}
    run = {row_name(_title(row))[0] for row in others}
    notes = {level: {} if level in run else {"float16": "not run"} for level in levels}
    for row in others:
        level, half = row_name(_title(row))
        if difference := row["less O0 (95 % interval)"]:
            values[level][half] = Value.of(difference)
        else:
            notes[level][half] = "diverged"
    better = "lower" if "loss" in metric else "higher"
    return Panel(
        f"{metric.removeprefix('held-out ')}\n({better} is better)",
        values,
        title=f"{name}\nO0: {reference['mean']}, s.d. {reference['s.d.']}",
        reference=0,
        is_symmetric=True,
        notes=notes,
    )


def row_name(title: str) -> tuple[str, str]:
    """`O3 float16, eps=0.001` is the level `O3, eps=0.001` in float16."""
    half = "bfloat16" if "bfloat16" in title else "float16"
    level = title.replace(f" {half}", "").removeprefix("torch.").removesuffix(" + GradScaler")
    return level, half


def _title(row: dict[str, str]) -> str:
    return next(iter(row.values()))


def memory() -> Figure:
    """Peak memory of a step by model and level."""
    found = Results.newest("memory")
    [rows] = found.tables().values()
    shown = [series.name for series in IN_MEMORY]
    by_model = {row[""]: _only(shown, _values(row)) for row in rows}
    told = "; ".join(
        f"{model}: " + ", ".join(f"{one} {values[one].middle:.2f}" for one in shown)
        for model, values in by_model.items()
    )
    panel = Panel(
        "peak memory relative to autocast + GradScaler",
        {_broken(model): values for model, values in by_model.items()},
        reference=1,
    )
    half = found.says(r"torch\.(\w+), Adam, counted")
    return Figure(
        "memory",
        Drawing([panel], IN_MEMORY, bars=True),
        f"Peak tensor memory of a step relative to autocast + GradScaler. {told}.",
        f"Peak tensor memory of a training step with Adam in {half}, relative to autocast + "
        f"GradScaler. Bytes are counted on a CPU, so each run gives the same. {found.where}.",
        found.path,
    )


def memory_of_ranks() -> Figure:
    """Memory of a rank under FSDP2 by number of ranks and level."""
    found = Results.newest("sharded")
    [rows] = found.tables().values()
    panels = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        of_these = {
            row[""]: {PEAK: Value.of(row["peak, MB"]), AT_REST: Value.of(row["at rest, MB"])}
            for row in rows
            if row["ranks"] == ranks
        }
        title = "one process" if ranks == "1" else f"{ranks} ranks"
        panels.append(Panel("MB", {_broken(row): one for row, one in of_these.items()}, title))
    told = "; ".join(f"{row['ranks']}, {row['']}: {row['peak, MB']}" for row in rows)
    half = found.says(r"torch\.(\w+), AdamW")
    model = found.says(r"^(\d+ transformer layers.*)\.$")
    return Figure(
        "memory_of_ranks",
        Drawing(panels, OF_A_RANK, bars=True, overlaid=True),
        f"Memory of one rank under FSDP2. Peaks in MB by ranks and row: {told}.",
        f"Memory of one rank: {model}, AdamW, {half}, gloo on a "
        f"CPU. At rest: weights and optimizer state. Bytes are counted, so each run gives the "
        f"same. {found.where}.",
        found.path,
    )


FIGURES: dict[str, Callable[[], Figure]] = {
    "speed_small_steps": small_steps,
    "speed_large_steps": large_steps,
    "accuracy": accuracy,
    "memory": memory,
    "memory_of_ranks": memory_of_ranks,
}


def completed(page: Path) -> str:
    """A page's text with each figure that it asks for."""
    text = page.read_text(encoding="utf-8")
    return PLACE.sub(lambda found: f"{found[1]}{FIGURES[found[2]]().block(page)}{found[3]}", text)


def report(options: Namespace) -> Iterator[str]:
    """Draw every figure, and complete every page."""
    for name, make in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(make().svg(), encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md")):
        if (new := completed(path)) != path.read_text(encoding="utf-8"):
            path.write_text(new, encoding="utf-8")
            yield f"wrote {path.relative_to(DOCS.parent)}"


def _values(row: dict[str, str]) -> dict[str, Value]:
    return {column: Value.of(cell) for column, cell in row.items() if column}


def _only(names: list[str], values: dict[str, Value]) -> dict[str, Value]:
    return {name: values[name] for name in names}


def _broken(name: str) -> str:
    """A row's name in lines that are short enough."""
    return "\n".join(textwrap.wrap(name, 16))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
