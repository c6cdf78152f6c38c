"""Tables as titles and texts, and the table of a sweep's rows: its columns and what they mean.

`terminal.py`, `page.py` and `summary_files.py` show the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ampatch.sweep.measure.step_parts import PARTS
from ampatch.sweep.report.figures import brief
from ampatch.sweep.report.judge import difference_text
from ampatch.sweep.report.margin import LOSS
from ampatch.sweep.report.numbers import (
    MISSING,
    decimals,
    mebibytes,
    number,
    plus_minus,
    quantity,
    ratio,
)
from ampatch.sweep.report.pace import FASTER, SLOWER
from ampatch.sweep.report.results import Row, Spread

STEP_NOTE = (
    "Step time is the median, without the first steps and evaluations; in brackets are the "
    "quartiles."
)
SPEED_NOTE = (
    "Speed is the median over the rounds of O0's step time over the row's, both of the same "
    "round, with quartiles; above 1 is faster, and O0's is that of its second run in each round "
    "over its first. Step times are over all rounds together, so where the machine changed its "
    "speed between rounds they may seem to contradict the speed, which does not depend on that."
)
LOSS_NOTE = "First and last loss are means over the first and last twentieth."
CPU_NOTE = "CPU time is that of all threads, and other processes hardly change it."
PARTS_NOTE = (
    "Parts of a step in ms: data is from the end of a step to the next forward, loading, "
    "transfer and zero_grad among it; forward is up to the loss; optimizer is unscaling, clipping "
    "and the step. What cannot be told apart in any row is unsplit."
)
SCATTER_NOTE = "± is the standard deviation over seeds."
MEMORY_NOTES = {
    "device": "Memory is the most that PyTorch allocated on the device.",
    "resident": "Memory is the largest resident set, PyTorch itself included.",
}


NOT_TOLD_APART, DIFFERS = "\N{DAGGER}", "\N{DOUBLE DAGGER}"
MARKS = {
    NOT_TOLD_APART: "speed not told apart from O0's by wall time",
    DIFFERS: "differs from O0 by more than the seeds do (corrected p below 0.05)",
}


@dataclass(frozen=True)
class Column:
    """A column; `main` ones are in the table of a paper, where all would be too many."""

    title: str
    text: Callable[[Any], str]  # of what a line shows: of a `Row`, most often
    right: bool = True
    main: bool = True


@dataclass(frozen=True)
class Table:
    """Columns, and a line of texts for each thing that they show."""

    columns: Sequence[Column]
    lines: list[list[str]]

    @classmethod
    def of(cls, columns: Sequence[Column], shown: Sequence[Any]) -> Table:
        """The table of these columns, a line for each of `shown`; of those that are not empty."""
        told = not_empty(columns, shown)
        return cls(told, [[column.text(one) for column in told] for one in shown])

    def __str__(self) -> str:
        """Aligned text, one line for each of the table's."""
        cells = [[column.title for column in self.columns], *self.lines]
        widths = [max(map(len, column)) for column in zip(*cells)]
        cells.insert(1, ["-" * width for width in widths])
        return "".join("  ".join(self._padded(line, widths)).rstrip() + "\n" for line in cells)

    def _padded(self, line: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
        for column, text, width in zip(self.columns, line, widths):
            yield text.rjust(width) if column.right else text.ljust(width)


def not_empty(columns: Sequence[Column], shown: Sequence[Any]) -> list[Column]:
    """The columns in which one of `shown` has something; all where there is nothing to show."""
    return [
        column
        for column in columns
        if not shown or any(column.text(one) != MISSING for one in shown)
    ]


NAMES = (
    Column("level", lambda row: row.opt_level, right=False),
    Column("dtype", lambda row: row.dtype, right=False),
)


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of a table of `rows`: the fixed ones and the scripts' metrics."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    sampled = any(row.samples_per_second for row in rows)
    samples = Column("samples/s", lambda row: number(row.samples_per_second, "{:.0f}"))
    cpu = Column("CPU ms", lambda row: number(row.cpu_ms, "{:.2f}"), main=False)
    return [
        *NAMES,
        Column("step ms", lambda row: _with_quartiles(row.step_times, "{:.2f}".format)),
        *([cpu] if any(row.cpu_ms is not None for row in rows) else []),
        Column("speed", lambda row: _with_quartiles(row.speeds, ratio, "x" + speed_mark(row))),
        *([samples] if sampled else []),
        Column("memory MiB", lambda row: mebibytes(row.memory_bytes)),
        Column("first loss", lambda row: quantity(row.first_loss), main=False),
        _scattered("last loss", LOSS, rows, lambda row: row.last_loss),
        *(_metric(name, rows) for name in names),
        *_difference(rows),
        Column("skips", _skips, main=False),
        Column("scale", lambda row: number(row.loss_scale, "{:.6g}"), main=False),
        Column("status", lambda row: brief(row.status), right=False, main=False),
    ]


def part_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of a table of the parts of a step; none where rows are split in other ways."""
    splits = {tuple(name for name in PARTS if row.parts.get(name)) for row in rows if row.parts}
    if len(splits) != 1:
        return []
    return [
        *NAMES,
        *(
            Column(name, lambda row, name=name: number(row.parts.get(name), "{:.2f}"))
            for name in splits.pop()
        ),
    ]


def by_row(shown: Sequence[Column]) -> list[Column]:
    """These columns with one for the names of the rows in the place of `NAMES`."""
    return [Column("row", lambda row: row.name, right=False), *shown[len(NAMES) :]]


def notes(rows: Sequence[Row]) -> list[str]:
    """Explanations of the columns that show something."""
    kinds = sorted({row.memory_kind for row in rows if row.memory_bytes is not None})
    shown = {
        STEP_NOTE: any(row.step_times for row in rows),
        SPEED_NOTE: any(row.speeds for row in rows),
        LOSS_NOTE: any(row.first_loss is not None for row in rows),
        CPU_NOTE: any(row.cpu_ms is not None for row in rows),
        SCATTER_NOTE: any(any(row.sds.values()) for row in rows),
    }
    of_columns = [note for note, is_shown in shown.items() if is_shown]
    return [*mark_notes(rows), *of_columns, *(MEMORY_NOTES[kind] for kind in kinds)]


def speed_mark(row: Row) -> str:
    """The mark of a speed that was measured and says nothing."""
    is_told = row.pace in ("", FASTER, SLOWER) and not row.by_cpu
    says_nothing = row.speeds is not None and not is_told
    return NOT_TOLD_APART if says_nothing else ""


def quality_mark(row: Row, name: str) -> str:
    """The mark of a quantity that differs from O0's."""
    outcome = next((one.outcome for one in row.comparisons if one.name == name), "")
    return DIFFERS if outcome in ("worse", "small", "better") else ""


def mark_notes(rows: Sequence[Row]) -> list[str]:
    """What the marks in a table of these rows mean, those that are there."""
    differs = any(quality_mark(row, one.name) for row in rows for one in row.comparisons)
    there = {NOT_TOLD_APART: any(map(speed_mark, rows)), DIFFERS: differs}
    return [f"{mark} {meaning}." for mark, meaning in MARKS.items() if there[mark]]


def _metric(name: str, rows: Sequence[Row]) -> Column:
    return _scattered(name.replace("_", " "), name, rows, lambda row: row.metrics.get(name))


def _scattered(
    title: str, name: str, rows: Sequence[Row], mean: Callable[[Row], float | None]
) -> Column:
    """A column of means ± standard deviations, all with the same decimals."""
    places = decimals(row.sds.get(name) for row in rows)

    def text(row: Row) -> str:
        return plus_minus(mean(row), row.sds.get(name), places) + quality_mark(row, name)

    return Column(title, text)


def _skips(row: Row) -> str:
    return f"{row.skipped}/{row.all_steps}" if row.all_steps else MISSING


def _difference(rows: Sequence[Row]) -> list[Column]:
    """The column of differences to O0, in the quantity of the verdicts, if any was tested."""
    judged = [row.comparisons[0] for row in rows if row.comparisons]
    name = next((one.name for one in judged if one.p is not None), None)
    if name is None:
        return []

    def text(row: Row) -> str:
        return (difference_text(row.comparisons[0]) if row.comparisons else "") or MISSING

    return [Column(f"{name.replace('_', ' ')} - O0", text)]


def _with_quartiles(spread: Spread | None, form: Callable[[float], str], unit: str = "") -> str:
    """`1.62x [1.58, 1.66]`, or without quartiles of a single value."""
    if spread is None:
        return MISSING
    text = form(spread.median) + unit
    if spread.n < 2:
        return text
    return f"{text} [{form(spread.low)}, {form(spread.high)}]"
