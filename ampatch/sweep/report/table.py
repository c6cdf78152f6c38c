"""The table of a sweep's rows as text: its columns and what they mean.

`terminal.py`, `render.py` and `result_files.py` show the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pandas import DataFrame

from ampatch.sweep.report.comparisons import MAX_STEP_RATIO, difference_text
from ampatch.sweep.report.directions import direction_options
from ampatch.sweep.report.margin import LAST_LOSS
from ampatch.sweep.report.numbers import MISSING, number, plus_minus, quantity_text, ratio
from ampatch.sweep.report.pace import FASTER, SLOWER
from ampatch.sweep.report.results import Row, Spread
from ampatch.sweep.report.run_figures import OK, status_name

NOISE_MARK, DIFFERS_MARK = "\N{DAGGER}", "\N{DOUBLE DAGGER}"
LOWER_MARK, HIGHER_MARK, UNKNOWN_MARK = "\N{DOWNWARDS ARROW}", "\N{UPWARDS ARROW}", "?"
_ARROWS = {"lower": LOWER_MARK, "higher": HIGHER_MARK, None: UNKNOWN_MARK}
MARKS = {
    NOISE_MARK: "a speed that may be noise: the verdict says why",
    DIFFERS_MARK: "differs from O0 by more than the seeds do",
}
_MEMORY = {
    "device": "memory: the most that PyTorch allocated on the device",
    "resident": "memory: the largest resident set, without the code of libraries",
}


@dataclass(frozen=True)
class Column:
    """A column of the table; only `main` columns are in the table for a paper."""

    title: str
    text: Callable[[Row], str]
    main: bool = True


def table(rows: Sequence[Row], main: bool = False) -> DataFrame:
    """The texts of all columns, or of the `main` columns; without empty columns."""
    chosen = [column for column in columns(rows) if column.main or not main]
    texts = [[column.text(row) for column in chosen] for row in rows]
    frame = DataFrame(texts, columns=[column.title for column in chosen], dtype=str)
    return frame.loc[:, frame.ne(MISSING).any().to_numpy()] if rows else frame


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of a table of `rows`: the fixed columns, and one for each metric."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    marks = {name: _ARROWS[way] for name, way in _directions(rows).items()}
    status = Column("status", lambda row: status_name(row.status), main=False)
    return [
        Column("row", lambda row: row.name),
        Column("step ms", lambda row: _with_quartiles(row.step_times, "{:.2f}".format)),
        Column("CPU ms", lambda row: number(row.cpu_ms, "{:.2f}"), main=False),
        Column("speed", _speed),
        Column("memory MiB", _mebibytes),
        *([Column("steps", lambda row: f"{row.steps or MISSING}")] if _is_uneven(rows) else []),
        Column("first loss", lambda row: quantity_text(row.first_loss), main=False),
        _mean_column(LAST_LOSS, lambda row: row.last_loss),
        *(
            _mean_column(name, lambda row, name=name: row.metrics.get(name), marks.get(name, ""))
            for name in names
        ),
        *_difference_columns(rows),
        Column("skips", _skips, main=False),
        Column("scale", lambda row: number(row.loss_scale, "{:.6g}"), main=False),
        *([status] if any(row.status != OK for row in rows) else []),
    ]


def _is_uneven(rows: Sequence[Row]) -> bool:
    """Whether rows that went well took different numbers of steps."""
    steps = [row.steps for row in rows if row.steps and row.outcome != "failed"]
    has_uneven = any(comparison.is_uneven for row in rows for comparison in row.comparisons)
    return has_uneven or (bool(steps) and max(steps) > MAX_STEP_RATIO * min(steps))


def notes(rows: Sequence[Row]) -> list[str]:
    """Explanations of the table's columns, up to four lines."""
    ways = _directions(rows).values()
    memory_kinds = sorted({row.memory_kind for row in rows if row.memory_bytes is not None})
    explanations = {
        "speed: O0's step time over the row's in the same round, above 1 is faster; in brackets "
        "quartiles": any(row.speeds for row in rows),
        "±: the standard deviation over seeds": any(any(row.sds.values()) for row in rows),
        **{f"{_ARROWS[way]}: {way} is better": way in ways for way in ("lower", "higher")},
        "losses: what the script passes to scale_loss (loss_id 0) or calls backward() on; with "
        "gradient accumulation already divided": any(row.last_loss is not None for row in rows),
    }
    used = [text for text, is_used in explanations.items() if is_used]
    text = "; ".join([*used, *(_MEMORY[kind] for kind in memory_kinds)])
    column_note = [f"{text[0].upper()}{text[1:]}."] if text else []
    return [*column_note, *_unknown_note(rows), *mark_notes(rows)]


def speed_mark(row: Row) -> str:
    """The mark of a measured speed that may be noise; "" for other rows."""
    is_clear = row.pace in ("", FASTER, SLOWER) and not row.by_cpu
    return "" if row.speeds is None or is_clear else NOISE_MARK


def accuracy_mark(row: Row, name: str) -> str:
    """The mark of a loss or metric that differs from O0's; "" if it does not."""
    outcome = next((c.outcome for c in row.comparisons if c.name == name), "")
    return DIFFERS_MARK if outcome in ("worse", "small", "better", "different") else ""


def mark_notes(rows: Sequence[Row]) -> list[str]:
    """Explanations of the marks that a table of these rows has."""
    differs = any(accuracy_mark(row, c.name) for row in rows for c in row.comparisons)
    used = {NOISE_MARK: any(map(speed_mark, rows)), DIFFERS_MARK: differs}
    return [f"{mark} {meaning}." for mark, meaning in MARKS.items() if used[mark]]


def _directions(rows: Sequence[Row]) -> dict[str, str | None]:
    """The directions of the rows' metrics; rows of older versions have none."""
    return {name: row.better[name] for row in rows for name in row.metrics if name in row.better}


def _unknown_note(rows: Sequence[Row]) -> list[str]:
    """A note on the metrics that have no direction, and the option that gives one."""
    names = [name for name, way in _directions(rows).items() if way is None]
    if not names:
        return []
    return [
        f"{UNKNOWN_MARK}: the name does not say whether lower or higher is better "
        f"({', '.join(names)}), so nothing is recommended if it differs; give "
        f"{direction_options(names[0])}."
    ]


def _mean_column(name: str, mean: Callable[[Row], float | None], mark: str = "") -> Column:
    """A column of means ± standard deviations; `mark` shows the direction in its title."""

    def text(row: Row) -> str:
        return plus_minus(mean(row), row.sds.get(name)) + accuracy_mark(row, name)

    return Column(f"{mark} {name.replace('_', ' ')}".strip(), text)


def _speed(row: Row) -> str:
    text = _with_quartiles(row.speeds, ratio, "x" + speed_mark(row))
    return f"O0 again {text}" if row.speeds and row.outcome == "baseline" else text


def _mebibytes(row: Row) -> str:
    return MISSING if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}"


def _skips(row: Row) -> str:
    return f"{row.skipped}/{row.all_steps}" if row.all_steps else MISSING


def _difference_columns(rows: Sequence[Row]) -> list[Column]:
    """The column of differences to O0 in the judged quantity; no column if none was tested."""
    judged = [row.comparisons[0] for row in rows if row.comparisons]
    name = next((comparison.name for comparison in judged if comparison.p is not None), None)
    if name is None:
        return []

    def text(row: Row) -> str:
        return (difference_text(row.comparisons[0]) if row.comparisons else "") or MISSING

    return [Column(f"{name.replace('_', ' ')} - O0", text)]


def _with_quartiles(spread: Spread | None, form: Callable[[float], str], unit: str = "") -> str:
    """`1.62x [1.58, 1.66]`; of a single value without quartiles."""
    if spread is None:
        return MISSING
    text = form(spread.median) + unit
    if spread.n < 2:
        return text
    return f"{text} [{form(spread.low)}, {form(spread.high)}]"
