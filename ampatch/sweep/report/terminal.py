"""A sweep's results on a terminal of any width, and as plain text in a file.

A table that is too wide is written in parts, one below the other.  Each part has the first column,
which names the row, and as many further columns as fit.  Long texts wrap between words.
"""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import TextIO

from ampatch.sweep.report.numbers import pluralize
from ampatch.sweep.report.results import Results, Row
from ampatch.sweep.report.run_figures import status_name
from ampatch.sweep.report.table import notes, table


def write_results(results: Results, stream: TextIO, shown_failures: Collection[str] = ()) -> None:
    """Write the table, the verdicts, the notes, and the recommendation.

    `shown_failures` are the labels of rows whose errors were shown and are not written again.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # latin-1 has no arrows
    if results.rows:
        write_table(results.rows, stream)
        stream.write("\n")
    for row in results.rows:
        if row.outcome == "failed" and row.label in shown_failures:
            failed = f"{row.runs - row.good_runs} of {pluralize(row.runs, 'run')}"
            _write_line(f"{row.name}: {status_name(row.status)} in {failed}, as shown", stream)
        else:
            _write_line(f"{row.name}: {row.verdict}", stream)
    for note in results.notes:
        _write_line(f"Note: {note}", stream)
    _write_line(f"Recommendation: {results.recommendation}", stream)


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the table, on a terminal in parts that fit, and what its columns mean."""
    indexed = table(rows).set_index("row").rename_axis(index=None, columns="row")
    lines = indexed.to_string(line_width=_width() if stream.isatty() else None).splitlines()
    stream.writelines(line.rstrip(" \\") + "\n" for line in lines)  # pandas marks parts by "\"
    for note in notes(rows):
        _write_line(note, stream)


def _write_line(text: str, stream: TextIO) -> None:
    """Write a line; on a terminal it wraps between words, and further lines are indented."""
    if stream.isatty():
        text = textwrap.fill(text, _width(), subsequent_indent="  ", break_on_hyphens=False)
    stream.write(text + "\n")


def _width() -> int:
    return max(20, shutil.get_terminal_size().columns - 1)
