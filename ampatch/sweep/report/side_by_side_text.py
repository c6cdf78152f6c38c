"""Two sweeps side by side, as text: what differs in how they ran, the table, the verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from ampatch.sweep.report.judge import difference_text, mean_and_sd, method, p_text
from ampatch.sweep.report.numbers import MISSING, mebibytes, number, ratio, setting_text
from ampatch.sweep.report.results import Comparison
from ampatch.sweep.report.side_by_side import RowPair, SideBySide
from ampatch.sweep.report.table import Column
from ampatch.sweep.report.terminal import write_columns

_SPEED = (
    "B speed: how many times as fast as A, from the median step times. The two sweeps ran at "
    "different times, so what else their machines did is in it. It is told apart where the "
    "quartiles of the step times differ by more than O0 against O0 did in either sweep; where "
    "that is too noisy, CPU time is compared so."
)
_LONGEST = 40  # characters of a setting; a hash needs no more to be seen as different
_DIFFERING = [  # of a name and the two settings
    Column("differs", lambda one: one[0].replace("_", " "), right=False),
    Column("A", lambda one: _short(one[1][0]), right=False),
    Column("B", lambda one: _short(one[1][1]), right=False),
]


def write_side_by_side(both: SideBySide, stream: TextIO) -> None:
    """Write what differs, the table of the rows that both have, a verdict each, and the method."""
    for name, sweep in (("A", both.first), ("B", both.second)):
        stream.write(f"{name}: {sweep.directory}, begun {sweep.results.started}\n")
    stream.write("\n")
    if both.differences:
        write_columns(list(both.differences.items()), _DIFFERING, stream)
    else:
        stream.write("Settings, versions and machine are the same.\n")
    stream.write("\n")
    write_columns(both.pairs, _columns(both), stream)
    stream.write("\n")
    for pair in both.pairs:
        stream.write(f"{pair.first.name}: {pair.verdict}\n")
    for name, rows in both.alone.items():
        if rows:
            stream.write(f"Only in {name}: {', '.join(rows)}\n")
    stream.write(f"\n{_SPEED}\n{method('A')}\n")


def _columns(both: SideBySide) -> list[Column]:
    judged = [pair.comparisons[0].name for pair in both.pairs if pair.comparisons]
    title = judged[0].replace("_", " ") if judged else "accuracy"
    return [
        Column("level", lambda pair: pair.first.opt_level, right=False),
        Column("dtype", lambda pair: pair.first.dtype, right=False),
        Column("A step ms", lambda pair: number(pair.first.step_ms, "{:.2f}")),
        Column("B step ms", lambda pair: number(pair.second.step_ms, "{:.2f}")),
        Column("B speed", lambda pair: MISSING if pair.speed is None else f"{ratio(pair.speed)}x"),
        Column("A MiB", lambda pair: mebibytes(pair.first.memory_bytes)),
        Column("B MiB", lambda pair: mebibytes(pair.second.memory_bytes)),
        _of_judged(f"A {title}", lambda one: mean_and_sd(one.base_mean, one.base_sd, one.n)),
        _of_judged(f"B {title}", lambda one: mean_and_sd(one.mean, one.sd, one.n)),
        _of_judged("B - A", lambda one: difference_text(one) or f"{one.difference:+.2g}"),
        _of_judged("p", lambda one: p_text(one, one.corrected_p)),
    ]


def _of_judged(title: str, text: Callable[[Comparison], str]) -> Column:
    """A column of the comparison that the verdicts are about."""

    def of_pair(pair: RowPair) -> str:
        return text(pair.comparisons[0]) if pair.comparisons else MISSING

    return Column(title, of_pair)


def _short(value: object) -> str:
    text = setting_text(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
