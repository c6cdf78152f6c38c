"""Which row is recommended, and what is missing where none is.

A row is recommended only if all of this was shown:

* it starts as O0 does (`starts.py`);
* neither the judged quantity nor the last loss is worse than O0's, by tests (`judge.py`);
* a difference in the judged quantity that matters would have been seen: the smallest one that the
  test finds is at most the margin, by default 1 % of O0's value;
* it is faster than O0, by enough to matter, on a machine that tells it apart (`pace.py`).

Of rows that are not told apart in speed the one with more FP32 is named.  `O1` and `autocast` keep
the same in FP32: of these the one that the script has already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ampatch.sweep.kinds import UNKNOWN, Kind
from ampatch.sweep.report import pace
from ampatch.sweep.report.judge import LOSS
from ampatch.sweep.report.paired import smallest_seen
from ampatch.sweep.report.results import Comparison, Row

NOTHING_YET = "nothing to compare yet"
MORE_SEEDS = 5  # are advised where the scatter over the seeds is not known
LEAST_SEEDS = 3  # with one and the same difference
MOST_SEEDS = 50
_HALVED = {"O0": 0, "autocast": 1, "O1": 1, "O2": 2, "O3": 3}  # how much is not in FP32


@dataclass(frozen=True)
class Margin:
    """The smallest difference that matters: a number, or with `is_share` a part of O0's value."""

    value: float = 0.01
    is_share: bool = True

    @classmethod
    def of(cls, text: str | None) -> Margin:
        """The margin that `"1%"` or `"0.005"` says; 1 % for None.  Raises `ValueError`."""
        if text is None:
            return cls()
        number = str(text).strip()
        is_share = number.endswith("%")
        try:
            value = float(number.removesuffix("%"))
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(
                f"--margin {text}: expected the smallest difference that matters, in units of what "
                'is judged ("0.005") or as a part of O0\'s value ("1%"), above 0.'
            )
        return cls(value / 100 if is_share else value, is_share)

    def beside(self, one: Comparison) -> float:
        """The margin in units of the quantity."""
        return self.value * abs(one.base_mean) if self.is_share else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g} % of O0's" if self.is_share else f"{self.value:g}"


ONE_PERCENT = Margin()


def recommendation(rows: Sequence[Row], margin: Margin = ONE_PERCENT, kind: Kind = UNKNOWN) -> str:
    """One line: what to train a script of this kind with, and why; or what is missing to say it."""
    apart = [row for row in rows if row.start]
    if apart:
        first = next((row for row in apart if row.outcome != "baseline"), apart[0])
        return (
            f"none: the rows do not start alike. {_name(first)} has a {first.start}; so the rows "
            "cannot be compared."
        )
    if not anything_compared(rows):
        return f"{NOTHING_YET}: {_what_lacks(rows)}."
    base = next(row for row in rows if row.outcome == "baseline")
    accurate = [row for row in rows if row is not base and not _is_worse(row)]
    faster = pace.worthwhile(accurate)
    if not faster:
        return pace.none_recommended(accurate, base) + _smaller(accurate, base)
    shown = [row for row in faster if not not_shown(row, rows, margin)]
    if not shown:
        fastest = max(faster, key=lambda row: row.speeds.median)
        return f"none yet. {_name(fastest)} has {pace.in_words(fastest)}, but " + not_shown(
            fastest, rows, margin
        )
    best, others = _with_most_fp32(shown, base, kind)
    return f"{_name(best)}: {best.verdict}.{_not_told_apart(others)}{_memory(best, base)}"


def anything_compared(rows: Sequence[Row]) -> bool:
    """Whether O0 and another row have gone well, so that there is something to say of the two."""
    outcomes = {row.outcome for row in rows}
    return "baseline" in outcomes and bool(outcomes - {"baseline", "failed"})


def _is_worse(row: Row) -> bool:
    """Whether the row has failed, or a test or a number that is none has shown it to be worse."""
    return row.outcome == "failed" or any(one.outcome == "worse" for one in _weighed(row))


def _weighed(row: Row) -> list[Comparison]:
    """What a recommendation weighs: the judged quantity, and the last loss."""
    return [one for number, one in enumerate(row.comparisons) if not number or one.name == LOSS]


def not_shown(row: Row, rows: Sequence[Row], margin: Margin) -> str:
    """What was not shown of a row's accuracy, as the end of a sentence; "" if all was."""
    if not row.comparisons:
        return "no loss or metric was compared with O0's."
    judged = row.comparisons[0]
    untested = next((one for one in _weighed(row) if one.outcome == "untested"), None)
    if untested is not None:
        return f"its {untested.name} is not tested ({untested.untested}).{_cure(untested)}"
    matters = margin.beside(judged)
    if judged.outcome != "within":
        return ""
    if judged.smallest is None:
        return _without_scatter(judged, matters, margin)
    if judged.smallest <= matters:
        return ""
    said = (
        f"with {judged.n} seeds a difference in {judged.name} of {judged.smallest:.2g} would have "
        f"gone unseen, and {matters:.2g} matters ({margin})."
    )
    tested = sum(
        any(one.name == judged.name and one.p is not None for one in other.comparisons)
        for other in rows
    )
    seeds = _seeds_for(judged, tested, matters)
    if seeds is None:
        return f"{said} Not even {MOST_SEEDS} seeds would show that; --margin says what matters."
    return f"{said} With {seeds} seeds that would be seen: --resume --seeds {seeds}."


def _without_scatter(one: Comparison, matters: float, margin: Margin) -> str:
    """What the same difference with each seed does not show: it has no scatter to test by."""
    if abs(one.difference) > matters:
        return (
            f"its {one.name} is {one.difference:+.2g} off with each of {one.n} seeds, and "
            f"{matters:.2g} matters ({margin}). --resume --seeds {max(MORE_SEEDS, one.n + 3)} says "
            "more."
        )
    if one.n < LEAST_SEEDS:
        return f"the same {one.name} with {one.n} seeds says little: --resume --seeds {MORE_SEEDS}."
    return ""


def _cure(one: Comparison) -> str:
    if one.untested == "one seed":
        return f" --resume --seeds {MORE_SEEDS} tests it."
    if one.untested == "O0 is the same with each seed":
        return " Have the seed reach the script: {seed} among its arguments, or --override-seeds."
    return ""


def _seeds_for(one: Comparison, rows: int, matters: float) -> int | None:
    """With how many seeds such a difference would be seen, if they scatter as these do."""
    numbers = range(one.n + 1, MOST_SEEDS + 1)
    return next((n for n in numbers if smallest_seen(one.scatter, n, rows) <= matters), None)


def _with_most_fp32(shown: Sequence[Row], base: Row, kind: Kind) -> tuple[Row, list[Row]]:
    """Of the rows that are not told apart from the fastest that with most FP32; and the faster."""
    has = "autocast" if kind.is_foreign else "O1"
    fastest = max(shown, key=lambda row: row.speeds.median)
    alike = [row for row in shown if not pace.told_apart(fastest, row, base)]
    best = min(
        alike, key=lambda row: (_HALVED[_level(row)], _level(row) != has, -row.speeds.median)
    )
    return best, [row for row in alike if row.speeds.median > best.speeds.median]


def _level(row: Row) -> str:
    """The opt level without "+tf32" and settings."""
    return re.split(r"[-+]", row.opt_level)[0]


def _not_told_apart(others: Sequence[Row]) -> str:
    if not others:
        return ""
    return f" Not told apart from it in speed: {', '.join(map(_name, others))}."


def _what_lacks(rows: Sequence[Row]) -> str:
    if not rows:
        return "no run has ended"
    if all(row.outcome != "baseline" for row in rows):
        return "there is no O0 that went well"
    return "O0 alone has run" if len(rows) == 1 else "no row beside O0 has gone well"


def _memory(row: Row, base: Row) -> str:
    if not (row.memory_bytes and base.memory_bytes):
        return ""
    much = _less(row, base)
    return f" It takes {much} {'as' if much.startswith('as') else 'than'} O0."


def _smaller(fit: Sequence[Row], base: Row) -> str:
    """The row that saves most memory, where no row saves time."""
    sizes = [row for row in fit if row.memory_bytes and base.memory_bytes]
    least = min(sizes, key=lambda row: row.memory_bytes, default=None)
    if least is None or least.memory_bytes > 0.95 * base.memory_bytes:
        return ""
    return f" {_name(least)} takes {_less(least, base)} than O0."


def _less(row: Row, base: Row) -> str:
    """How much less memory the row takes: `38 % less memory`."""
    percent = round(100 * (1 - row.memory_bytes / base.memory_bytes))
    if not percent:
        return "as much memory"
    return f"{abs(percent)} % {'less' if percent > 0 else 'more'} memory"


def _name(row: Row) -> str:
    return f"{row.opt_level} in {row.dtype}"
