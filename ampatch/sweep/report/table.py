"""A sweep's rows as a table: its columns, what they mean, and the table as aligned text.

`terminal.py`, `page.py`, `summary_files.py` and `latex.py` show the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampatch.sweep.report.judge import LOSS
from ampatch.sweep.report.numbers import MISSING, decimals, number, plus_minus, quantity
from ampatch.sweep.report.results import Row

NOTES = (
    "Step time is the median, without the first steps and evaluations.",
    "First and last loss are means over the first and last twentieth of the losses.",
)
SCATTER_NOTE = "± is the standard deviation over seeds."
MEMORY_NOTES = {
    "device": "Memory is the most that PyTorch allocated on the device.",
    "resident": "Memory is the largest resident set, PyTorch itself included.",
}


@dataclass(frozen=True)
class Column:
    """A column; `main` ones are in the table of a paper, where all would be too many."""

    title: str
    text: Callable[[Row], str]
    right: bool = True
    main: bool = True


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of a table of `rows`: the fixed ones and the scripts' metrics."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    sampled = any(row.samples_per_second for row in rows)
    samples = Column("samples/s", lambda row: number(row.samples_per_second, "{:.0f}"))
    return [
        Column("level", lambda row: row.opt_level, right=False),
        Column("dtype", lambda row: row.dtype, right=False),
        Column("step ms", lambda row: number(row.step_ms, "{:.2f}")),
        Column("speed", lambda row: number(row.speed, "{:.2f}x")),
        *([samples] if sampled else []),
        Column("memory MiB", _mebibytes),
        Column("first loss", lambda row: quantity(row.first_loss), main=False),
        _scattered("last loss", LOSS, rows, lambda row: row.last_loss),
        *(_metric(name, rows) for name in names),
        Column("skips", _skips, main=False),
        Column("scale", lambda row: number(row.loss_scale, "{:.6g}"), main=False),
        Column("status", lambda row: row.status, right=False, main=False),
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Explanations of the columns, each a sentence."""
    kinds = sorted({row.memory_kind for row in rows if row.memory_bytes is not None})
    scatter = [SCATTER_NOTE] if any(any(row.sds.values()) for row in rows) else []
    return [*NOTES, *scatter, *(MEMORY_NOTES[kind] for kind in kinds)]


def plain_table(rows: Sequence[Row], shown: Sequence[Column] | None = None) -> str:
    """The table, or the columns `shown` of it, as aligned text, one line per row."""
    shown = columns(rows) if shown is None else shown
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


def _metric(name: str, rows: Sequence[Row]) -> Column:
    return _scattered(name.replace("_", " "), name, rows, lambda row: row.metrics.get(name))


def _scattered(
    title: str, name: str, rows: Sequence[Row], mean: Callable[[Row], float | None]
) -> Column:
    """A column of means ± standard deviations, all with the same decimals."""
    places = decimals(row.sds.get(name) for row in rows)
    return Column(title, lambda row: plus_minus(mean(row), row.sds.get(name), places))


def _skips(row: Row) -> str:
    return f"{row.skipped}/{row.all_steps}" if row.all_steps else MISSING


def _mebibytes(row: Row) -> str:
    return MISSING if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}"
