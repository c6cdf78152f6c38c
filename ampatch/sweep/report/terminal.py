"""A sweep's results on a terminal of any width, and as plain text in a file.

A table that is too wide is written in parts, one below the other: each has the first
columns, which name the row, and as many others as fit.  Long texts wrap between words.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TextIO

from ampatch.sweep.report.figures import OK, brief
from ampatch.sweep.report.numbers import counted
from ampatch.sweep.report.results import Results, Row
from ampatch.sweep.report.table import (
    PARTS_NOTE,
    Column,
    Table,
    columns,
    not_empty,
    notes,
    part_columns,
)

GAP = 2  # spaces between columns
_NAME, _WORDS = 16, 12  # the most that a name, and a text, need where there is little room


def write_results(results: Results, stream: TextIO, told: Collection[str] = ()) -> None:
    """Write the tables, the verdicts, the notes, and the recommendation.

    `told` are the labels of rows whose errors have been shown: these are not written again.
    """
    rows = results.rows
    if rows:
        write_table(rows, stream)
        parts = part_columns(rows)
        if parts:
            stream.write("\n")
            write_columns(rows, parts, stream)
            _say(PARTS_NOTE, stream)
        stream.write("\n")
    for row in rows:
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


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the table and what its columns are, in colour on a terminal if rich is installed."""
    write_columns(rows, columns(rows), stream)
    if stream.isatty():
        stream.write("\n")
    for note in notes(rows):
        _say(note, stream)


def write_columns(rows: Sequence[Any], shown: Sequence[Column], stream: TextIO) -> None:
    """Write a table with a line for each of `rows`, in parts on a terminal."""
    if not stream.isatty():
        stream.write(str(Table.of(shown, rows)))
        return
    shown = not_empty(shown, rows)
    write = _write_rich if importlib.util.find_spec("rich") else _write_plain
    for number, part in enumerate(_parts(rows, shown)):
        stream.write("\n" if number else "")
        write(Table.of(part, rows), stream)


def _parts(rows: Sequence[Any], shown: Sequence[Column]) -> Iterable[list[Column]]:
    """The columns in parts that fit on the terminal; without one that only says "ok"."""
    names = list(itertools.takewhile(lambda column: not column.right, shown))
    room = _width() - sum(min(_widest(name, rows), _NAME) + GAP for name in names)
    parts: list[list[Column]] = [[]]
    free = room
    for column in shown[len(names) :]:
        least = _widest(column, rows) if column.right else min(_widest(column, rows), _WORDS)
        if parts[-1] and least + GAP > free:
            parts.append([])
            free = room
        parts[-1].append(column)
        free -= least + GAP
    if len(parts) > 1 and all(column.text(row) == OK for column in parts[-1] for row in rows):
        parts.pop()
    return ([*names, *part] for part in parts)


def _widest(column: Column, rows: Sequence[Any]) -> int:
    """The width in which no cell is cut, and no word of the title."""
    return max(map(len, [*column.title.split(), *(column.text(row) for row in rows)]))


def _write_plain(table: Table, stream: TextIO) -> None:
    stream.write(str(table))


def _write_rich(table: Table, stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), show_edge=False)
    for column, *texts in zip(table.columns, *table.lines):
        drawn.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            overflow="fold",
            max_width=max(map(len, [*column.title.split(), *texts])),
        )
    for line in table.lines:
        styles = (
            ("green" if text == OK else "red") if column.title == "status" else ""
            for column, text in zip(table.columns, line)
        )
        drawn.add_row(*map(Text, line, styles))
    # Both sizes: with one alone rich takes 80 columns for a terminal that it does not know.
    Console(file=stream, highlight=False, width=_width(), height=25).print(drawn)


def _say(text: str, stream: TextIO) -> None:
    """Write a line; on a terminal it wraps between words, and further lines are indented."""
    if stream.isatty():
        text = textwrap.fill(text, _width(), subsequent_indent="  ", break_on_hyphens=False)
    stream.write(text + "\n")


def _width() -> int:
    return max(20, shutil.get_terminal_size().columns - 1)
