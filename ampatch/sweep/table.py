"""A sweep's rows as a table: with rich on a terminal, as aligned text elsewhere."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from ampatch.sweep.summary import OK, Summary

MISSING = "-"
NOTE = (
    "Step time is the median, first steps and evaluations left out; first and last loss are "
    "means over the first and last twentieth."
)


@dataclass(frozen=True)
class Column:
    title: str
    text: Callable[[Summary], str]
    right: bool = True


def columns(rows: Sequence[Summary]) -> list[Column]:
    """The columns that a table of `rows` has: the fixed ones and the scripts' metrics."""
    memory = {row.memory_kind for row in rows if row.memory_bytes is not None}
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return [
        Column("level", lambda row: row.opt_level, right=False),
        Column("dtype", lambda row: row.dtype, right=False),
        Column("step ms", lambda row: _number(row.step_ms, "{:.2f}")),
        Column("speed", lambda row: _number(row.speed, "{:.2f}x")),
        Column("/".join(sorted(memory)) + " MiB", _mebibytes),
        Column("first loss", lambda row: _number(row.first_loss, "{:.4f}")),
        Column("last loss", lambda row: _number(row.last_loss, "{:.4f}")),
        *(Column(name.replace("_", " "), _metric(name)) for name in names),
        Column("skipped", lambda row: f"{row.skipped}/{row.steps}" if row.steps else MISSING),
        Column("scale", lambda row: _number(row.loss_scale, "{:.6g}")),
        Column("status", lambda row: row.status, right=False),
    ]


def write_table(rows: Sequence[Summary], stream: TextIO) -> None:
    """Write the table to `stream`, in colour if that is a terminal and rich is there."""
    if stream.isatty() and importlib.util.find_spec("rich"):
        _write_rich(rows, stream)
    else:
        stream.write(plain_table(rows))
    stream.write(NOTE + "\n")


def plain_table(rows: Sequence[Summary]) -> str:
    """The table as aligned text, one line per row."""
    shown = columns(rows)
    cells = [[column.title for column in shown]]
    cells += [[column.text(row) for column in shown] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for line in cells:
        aligned = (
            text.rjust(width) if column.right else text.ljust(width)
            for column, text, width in zip(shown, line, widths)
        )
        lines.append("  ".join(aligned).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n"


def _write_rich(rows: Sequence[Summary], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = columns(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        kind = {"justify": "right", "no_wrap": True} if column.right else {"overflow": "fold"}
        table.add_column(column.title.replace(" ", "\n", 1), **kind)
    for row in rows:
        style = "green" if row.status == OK else "red"
        *cells, last = (Text(column.text(row)) for column in shown)
        table.add_row(*cells, Text(last.plain, style=style))
    Console(file=stream).print(table)


def _metric(name: str) -> Callable[[Summary], str]:
    return lambda row: _number(row.metrics.get(name), "{:.4f}")


def _mebibytes(row: Summary) -> str:
    return MISSING if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return MISSING
    return form.format(value) if math.isfinite(value) else str(value)
