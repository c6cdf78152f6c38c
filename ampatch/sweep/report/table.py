"""A sweep's rows as a table: with rich on a terminal, as aligned text elsewhere."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ampatch.sweep.measure.step_parts import PARTS, UNSPLIT
from ampatch.sweep.report.figures import OK
from ampatch.sweep.report.judge import difference_text
from ampatch.sweep.report.results import Results, Row, Spread

MISSING = "-"
NOTES = (
    "Step time is the median, without the first steps and evaluations; in brackets are the "
    "quartiles.",
    "Speed is the median over the rounds of O0's step time over the row's, both of the same "
    "round, with quartiles; above 1 is faster, and O0's is that of its second run in each round "
    "over its first. Step times are over all rounds together, so where the machine changed its "
    "speed between rounds they may seem to contradict the speed, which does not depend on that.",
    "First and last loss are means over the first and last twentieth.",
)
CPU_NOTE = "CPU time is that of all threads, and other processes hardly change it."
PARTS_NOTE = (
    "Parts of a step in ms: data is from the end of a step to the next forward, loading, "
    "transfer and zero_grad among it; forward is up to the loss; optimizer is unscaling, clipping "
    "and the step. A part that cannot be told from others is missing (-) and counted as unsplit."
)
MEMORY_NOTES = {
    "device": "Memory is the most that PyTorch allocated on the device.",
    "resident": "Memory is the largest resident set, PyTorch itself included.",
}


@dataclass(frozen=True)
class Column:
    title: str
    text: Callable[[Row], str]
    right: bool = True


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of a table of `rows`: the fixed ones and the scripts' metrics."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    sampled = any(row.samples_per_second for row in rows)
    samples = Column("samples/s", lambda row: _number(row.samples_per_second, "{:.0f}"))
    cpu = Column("CPU ms", lambda row: _number(row.cpu_ms, "{:.2f}"))
    return [
        Column("level", lambda row: row.opt_level, right=False),
        Column("dtype", lambda row: row.dtype, right=False),
        Column("step ms", lambda row: _with_quartiles(row.step_times, "{:.2f}")),
        *([cpu] if any(row.cpu_ms is not None for row in rows) else []),
        Column("speed", lambda row: _with_quartiles(row.speeds, "{:.2f}", "x")),
        *([samples] if sampled else []),
        Column("memory MiB", _mebibytes),
        Column("first loss", lambda row: _number(row.first_loss, "{:.4f}")),
        Column("last loss", lambda row: _number(row.last_loss, "{:.4f}")),
        *(Column(name.replace("_", " "), _metric(name)) for name in names),
        *_difference(rows),
        Column("skips", lambda row: f"{row.skipped}/{row.all_steps}" if row.all_steps else MISSING),
        Column("scale", lambda row: _number(row.loss_scale, "{:.6g}")),
        Column("status", lambda row: row.status, right=False),
    ]


def part_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of a table of the parts of a step; none where no part is known."""
    known = [name for name in PARTS if any(name in row.parts for row in rows)]
    if not known:
        return []
    shown = [name for name in PARTS if name in known or name != UNSPLIT]
    return [
        Column("level", lambda row: row.opt_level, right=False),
        Column("dtype", lambda row: row.dtype, right=False),
        *(Column(name, _part(name)) for name in shown),
    ]


def write_results(results: Results, stream: TextIO) -> None:
    """Write the tables, the verdicts, the notes, and the recommendation."""
    write_table(results.rows, stream)
    parts = part_columns(results.rows)
    if parts:
        stream.write(f"\n{aligned(results.rows, parts)}{PARTS_NOTE}\n")
    stream.write("\n")
    for row in results.rows:
        stream.write(f"{row.name}: {row.verdict}\n")
    for note in results.notes:
        stream.write(f"Note: {note}\n")
    for name, text in results.machine.items():
        stream.write(f"{name.capitalize()}: {text}.\n")
    stream.write(f"Recommendation: {results.recommendation}\n")


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the table to `stream`, in colour on a terminal if rich is installed."""
    if not (stream.isatty() and importlib.util.find_spec("rich") and _write_rich(rows, stream)):
        stream.write(plain_table(rows))
    for note in notes(rows):
        stream.write(note + "\n")


def notes(rows: Sequence[Row]) -> list[str]:
    """Explanations of the columns."""
    kinds = sorted({row.memory_kind for row in rows if row.memory_bytes is not None})
    cpu = [CPU_NOTE] if any(row.cpu_ms is not None for row in rows) else []
    return [*NOTES, *cpu, *(MEMORY_NOTES[kind] for kind in kinds)]


def plain_table(rows: Sequence[Row]) -> str:
    """The table as aligned text, one line per row."""
    return aligned(rows, columns(rows))


def aligned(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """These columns of the rows as text."""
    heads = [(column.title, column.right) for column in shown]
    return aligned_cells(heads, [[column.text(row) for column in shown] for row in rows])


def aligned_cells(heads: Sequence[tuple[str, bool]], lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells under `heads`: titles, and whether a column is aligned to the right."""
    cells = [[title for title, _ in heads], *lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    text = []
    for line in cells:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for (_, right), cell, width in zip(heads, line, widths)
        )
        text.append("  ".join(padded).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text) + "\n"


def _write_rich(rows: Sequence[Row], stream: TextIO) -> bool:
    """Write the widest table that fits; False if the terminal is too narrow."""
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    for whole, gap in ((True, 1), (False, 1), (False, 0)):
        table = _rich_table(rows, whole, gap)
        wanted = console.measure(table, options=console.options.update(width=10_000)).maximum
        if wanted <= console.width:
            console.print(table)
            for row in rows:
                if not whole and row.status != OK:
                    console.print(f"{row.name} {row.status}", markup=False)
            return True
    return False


def _rich_table(rows: Sequence[Row], whole: bool, gap: int) -> Any:
    """A rich table with whole statuses, or only the first words of each."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = columns(rows)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False)
    for column in shown:
        title = column.title.replace(" ", "\n", 1)
        table.add_column(title, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        *cells, status = (column.text(row) for column in shown)
        status = status if whole else re.split(":| at ", status)[0]
        style = "green" if row.status == OK else "red"
        table.add_row(*map(Text, cells), Text(status, style=style))
    return table


def _difference(rows: Sequence[Row]) -> list[Column]:
    """The column of differences to O0, in the quantity of the verdicts, if any was tested."""
    judged = [row.comparisons[0] for row in rows if row.comparisons]
    name = next((one.name for one in judged if one.p is not None), None)
    if name is None:
        return []

    def text(row: Row) -> str:
        return (difference_text(row.comparisons[0]) if row.comparisons else "") or MISSING

    return [Column(f"{name.replace('_', ' ')} - O0", text)]


def _metric(name: str) -> Callable[[Row], str]:
    return lambda row: _number(row.metrics.get(name), "{:.4f}")


def _part(name: str) -> Callable[[Row], str]:
    return lambda row: _number(row.parts.get(name), "{:.2f}")


def _with_quartiles(spread: Spread | None, form: str, unit: str = "") -> str:
    """`1.62x [1.58, 1.66]`, or without quartiles of a single value."""
    if spread is None:
        return MISSING
    text = form.format(spread.median) + unit
    if spread.n < 2:
        return text
    return f"{text} [{form.format(spread.low)}, {form.format(spread.high)}]"


def _mebibytes(row: Row) -> str:
    return MISSING if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return MISSING
    return form.format(value) if math.isfinite(value) else str(value)
