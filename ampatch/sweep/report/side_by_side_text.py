"""Two sweeps side by side, as text: what differs in how they ran, the table, the verdicts."""

from __future__ import annotations

from typing import Any, TextIO

from ampatch.sweep.report.judge import difference_text, mean_and_sd, method, p_text
from ampatch.sweep.report.numbers import MISSING, ratio
from ampatch.sweep.report.pace import NOISE
from ampatch.sweep.report.results import Row
from ampatch.sweep.report.side_by_side import RowPair, SideBySide
from ampatch.sweep.report.table import aligned_cells

_HEADS = (
    ("level", False),
    ("dtype", False),
    ("A step ms", True),
    ("B step ms", True),
    ("B speed", True),
    ("A MiB", True),
    ("B MiB", True),
)
_SPEED = (
    "B speed: how many times as fast as A, from the median step times. The two sweeps ran at "
    "different times, so what else their machines did is in it. It is told apart where the "
    "quartiles of the step times do not overlap and O0 against O0 was within "
    f"{100 * NOISE:.0f} % in both sweeps."
)
_LONGEST = 40  # characters of a setting


def write_side_by_side(both: SideBySide, stream: TextIO) -> None:
    """Write what differs, the table of the rows that both have, a verdict each, and the method."""
    for name, sweep in (("A", both.first), ("B", both.second)):
        stream.write(f"{name}: {sweep.directory}, begun {sweep.results.started}\n")
    stream.write("\n" + _differences(both) + "\n")
    stream.write(_table(both) + "\n")
    for pair in both.pairs:
        stream.write(f"{pair.first.name}: {pair.verdict}\n")
    for name, rows in both.alone.items():
        if rows:
            stream.write(f"Only in {name}: {', '.join(rows)}\n")
    stream.write(f"\n{_SPEED}\n{method('A')}\n")


def _differences(both: SideBySide) -> str:
    if not both.differences:
        return "Settings, versions and machine are the same.\n"
    lines = [
        [name.replace("_", " "), _short(ours), _short(theirs)]
        for name, (ours, theirs) in both.differences.items()
    ]
    return aligned_cells([("differs", False), ("A", False), ("B", False)], lines)


def _table(both: SideBySide) -> str:
    judged = [pair.comparisons[0].name for pair in both.pairs if pair.comparisons]
    title = judged[0].replace("_", " ") if judged else "accuracy"
    heads = [*_HEADS, (f"A {title}", True), (f"B {title}", True), ("B - A", True), ("p", True)]
    return aligned_cells(heads, [_cells(pair) for pair in both.pairs])


def _cells(pair: RowPair) -> list[str]:
    first, second = pair.first, pair.second
    cells = [first.opt_level, first.dtype]
    cells += [_number(row.step_ms, "{:.2f}") for row in (first, second)]
    cells += [
        MISSING if pair.speed is None else f"{ratio(pair.speed)}x",
        *map(_mebibytes, (first, second)),
    ]
    if not pair.comparisons:
        return [*cells, MISSING, MISSING, MISSING, MISSING]
    one = pair.comparisons[0]
    return [
        *cells,
        mean_and_sd(one.base_mean, one.base_sd, one.n),
        mean_and_sd(one.mean, one.sd, one.n),
        difference_text(one) or f"{one.difference:+.2g}",
        p_text(one, one.corrected_p),
    ]


def _mebibytes(row: Row) -> str:
    return MISSING if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}"


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def _short(value: Any) -> str:
    """A setting in few characters; a hash, for one, needs no more to be seen as different."""
    if value is None or value in ([], {}):
        return "none"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
