"""A sweep's results on a terminal of any width, and as plain text in a file.

A table that is too wide is written in parts, one below the other: each has the first
columns, which name the row, and as many others as fit.  Long texts wrap between words.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ampatch.sweep.report.figures import OK, brief
from ampatch.sweep.report.numbers import counted
from ampatch.sweep.report.results import Results, Row
from ampatch.sweep.report.table import PARTS_NOTE, Column, aligned, columns, notes, part_columns

GAP = 2  # spaces between columns
_LEAST = 10  # the least width of a column of words


def write_results(results: Results, stream: TextIO, told: Collection[str] = ()) -> None:
    """Write the tables, the verdicts, the notes, and the recommendation.

    `told` are the labels of rows whose errors have been shown: these are not written again.
    """
    if results.rows:
        _write_tables(results.rows, stream)
    for row in results.rows:
        if row.outcome == "failed" and row.label in told:
            failed = f"{row.runs - row.good_runs} of {counted(row.runs, 'run')}"
            _say(f"{row.name}: {brief(row.status)} in {failed}, as shown", stream)
        else:
            _say(f"{row.name}: {row.verdict}", stream)
    for note in results.notes:
        _say(f"Note: {note}", stream)
    for name, text in results.machine.items():
        _say(f"{name.capitalize()}: {text}.", stream)
    _say(f"Recommendation: {results.recommendation}", stream)


def _write_tables(rows: Sequence[Row], stream: TextIO) -> None:
    write_table(rows, stream)
    parts = part_columns(rows)
    if parts:
        stream.write("\n")
        _write_columns(rows, parts, stream)
        _say(PARTS_NOTE, stream)
    stream.write("\n")


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the table and what its columns are, in colour on a terminal if rich is installed."""
    _write_columns(rows, columns(rows), stream)
    if stream.isatty():
        stream.write("\n")
    for note in notes(rows):
        _say(note, stream)


def _write_columns(rows: Sequence[Row], shown: Sequence[Column], stream: TextIO) -> None:
    if not stream.isatty():
        stream.write(aligned(rows, shown))
        return
    parts = _parts(rows, shown, _width())
    if importlib.util.find_spec("rich"):
        _write_rich(rows, parts, stream)
    else:
        plain = (aligned(rows, [sized.column for sized in part]) for part in parts)
        stream.write("\n".join(plain))


@dataclass(frozen=True)
class _Sized:
    """A column and the width it gets."""

    column: Column
    width: int


def _parts(rows: Sequence[Row], shown: Sequence[Column], width: int) -> list[list[_Sized]]:
    """The columns in parts that fit into `width`."""
    names = list(itertools.takewhile(lambda column: not column.right, shown))
    share = (width - GAP * len(names)) // (len(names) + 1)  # of a name, at most
    first = [_Sized(one, min(_widest(one, rows), max(share, _LEAST))) for one in names]
    free = width - _taken(first)
    parts: list[list[_Sized]] = [[]]
    for column in shown[len(names) :]:
        wanted = _widest(column, rows)
        least = wanted if column.right else min(wanted, max(_LEAST, _longest_word(column, rows)))
        left = free - _taken(parts[-1])
        if parts[-1] and least > left:
            parts.append([])
            left = free
        parts[-1].append(_Sized(column, max(1, min(wanted, left))))
    if len(parts) > 1 and _says_ok_only(parts[-1], rows):
        parts.pop()
    return [[*first, *part] for part in parts]


def _says_ok_only(part: Sequence[_Sized], rows: Sequence[Row]) -> bool:
    return all(sized.column.text(row) == OK for sized in part for row in rows)


def _taken(part: Sequence[_Sized]) -> int:
    return sum(sized.width + GAP for sized in part)


def _widest(column: Column, rows: Sequence[Row]) -> int:
    """The width in which no cell is cut, and no word of the title."""
    words = column.title.split()
    return max(map(len, [*words, *(column.text(row) for row in rows)]))


def _longest_word(column: Column, rows: Sequence[Row]) -> int:
    words = (word for row in rows for word in column.text(row).split())
    return max(map(len, words), default=1)


def _write_rich(rows: Sequence[Row], parts: Sequence[Sequence[_Sized]], stream: TextIO) -> None:
    from rich.console import Console

    # Both sizes: with one alone rich takes 80 columns for a terminal that it does not know.
    console = Console(file=stream, highlight=False, width=_width(), height=25)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(_rich_table(rows, part))


def _rich_table(rows: Sequence[Row], part: Sequence[_Sized]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), show_edge=False)
    for sized in part:
        side = "right" if sized.column.right else "left"
        title = Text("\n".join(textwrap.wrap(sized.column.title, sized.width)), justify=side)
        table.add_column(title, width=sized.width, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(sized.column, row, Text) for sized in part))
    return table


def _cell(column: Column, row: Row, text: Any) -> Any:
    style = ("green" if row.status == OK else "red") if column.title == "status" else ""
    return text(column.text(row), style=style)


def _say(text: str, stream: TextIO) -> None:
    """Write a line; on a terminal it wraps between words, and further lines are indented."""
    if stream.isatty():
        text = textwrap.fill(text, _width(), subsequent_indent="  ", break_on_hyphens=False)
    stream.write(text + "\n")


def _width() -> int:
    return max(20, shutil.get_terminal_size().columns - 1)
