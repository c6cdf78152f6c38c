"""Which row is recommended, or what is missing to recommend one, as a short text.

docs/explanation/sweep_figures.md says what must be shown of a row ("What is recommended").  Which
rows start alike, is decided in `first_loss_check.py`; which are as accurate as O0, in `margin.py`;
which are faster, in `pace.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ampatch.sweep.kinds import UNKNOWN, Kind
from ampatch.sweep.options import ROUNDS
from ampatch.sweep.report import pace
from ampatch.sweep.report.comparisons import ONE_SEED, SAME_SEEDS, difference_text, quality_text
from ampatch.sweep.report.directions import option
from ampatch.sweep.report.margin import (
    at_worst,
    first_untested,
    is_within_margin,
    margin_text,
    worse,
)
from ampatch.sweep.report.paired_test import TESTED, smallest_detectable
from ampatch.sweep.report.results import Comparison, Row
from ampatch.sweep.trial import BASE

NOTHING_YET = "Nothing to compare yet"
MOST_SEEDS = 50
_LESS_MEMORY = 0.95  # relative to O0's; above it no sentence mentions memory
_IN_HALF = {"O0": 0, "autocast": 1, "O1": 1, "O2": 2, "O3": 3}  # larger: more is in half


def recommendation(rows: Sequence[Row], kind: Kind = UNKNOWN, resume_options: str = "") -> str:
    """The row to train a script of this kind with, and why; or what is known and what settles it.

    `resume_options` continue a sweep whose budget was too small to test accuracy.
    """
    other_starts = [row for row in rows if row.start]
    if other_starts:
        first = next((row for row in other_starts if row.outcome != "baseline"), other_starts[0])
        return (
            "None: the rows do not start alike, so they cannot be compared. "
            f"{_name(first)} has a {first.start}."
        )
    if not anything_compared(rows):
        return f"{NOTHING_YET}: {_why_nothing(rows)}."
    base = next(row for row in rows if row.outcome == "baseline")
    good = [row for row in rows if row.outcome not in ("baseline", "failed")]
    maybe_faster = [row for row in good if not pace.is_not_worthwhile(row)]
    candidates = [row for row in maybe_faster if not worse(row)]
    if maybe_faster and not candidates:
        return _none_as_accurate(maybe_faster)
    if not candidates:
        return _none_faster([row for row in good if row.pace], base)
    proven = [row for row in pace.worthwhile(candidates) if not open_question(row)[0]]
    if not proven:
        return _undecided(candidates, kind, resume_options)
    fastest = max(proven, key=lambda row: row.decisive.median)
    alike = [row for row in proven if not pace.is_surely_faster(fastest, row)]
    best = _with_most_fp32(alike, kind)
    others = [row for row in alike if row.decisive.median > best.decisive.median]
    advice = f"Use {_name(best)}: {pace.speed_text(best)}; {_accuracy(best.comparisons[0])}."
    memory = _memory(best, base)
    also = [f"It takes {memory} than O0"] if memory else []
    if others:
        also.append(f"{_names(others)} may be as fast or faster")
    return f"{advice} {', and '.join(also)}." if also else advice


def anything_compared(rows: Sequence[Row]) -> bool:
    """Whether O0 and another row have good runs, which can be compared."""
    outcomes = {row.outcome for row in rows}
    return "baseline" in outcomes and bool(outcomes - {"baseline", "failed"})


def open_question(row: Row) -> tuple[str, str]:
    """What is not known of a row's accuracy, and the option that may settle it; "" if nothing."""
    if not row.comparisons:
        why = "no loss or metric was compared with O0's" if row.steps else "it was only timed"
        return why, "" if row.steps else f"--seeds {TESTED}"
    judged = row.comparisons[0]
    if judged.has_no_verdict:
        seeds = f"--seeds {TESTED} " if judged.untested == ONE_SEED else ""
        return no_direction(row), seeds + option(judged.name)
    untested = first_untested(row)
    if untested is not None:
        cure = f"--seeds {TESTED}" if untested.untested == ONE_SEED else ""
        return f"its {untested.title} is not tested ({untested.untested}){_remedy(untested)}", cure
    ends = f"with {judged.n} seeds the 95 % interval of its {judged.title} ends"
    matters = f"{judged.matters:.2g} matters (--margin)"
    if not judged.scatter:
        off = f"its {judged.title} is {judged.difference:+.2g} off with each of {judged.n} seeds"
        if not is_within_margin(judged):
            return f"{off}, and {matters}", f"--seeds {judged.n + 2}"
        few = f"the same {judged.title} with {judged.n} seeds says little", f"--seeds {TESTED}"
        return few if judged.n < TESTED else ("", "")
    if is_within_margin(judged):
        return "", ""
    why, seeds = f"{ends} {at_worst(judged):.2g} worse than O0's, and {matters}", _seeds_for(judged)
    if seeds is None:
        return f"{why}; not even {MOST_SEEDS} seeds like these would end it before that", ""
    return why, f"--seeds {seeds}"


def no_direction(row: Row) -> str:
    """How the judged metric differs from O0's, if it has no direction; else ""."""
    if not (row.comparisons and row.comparisons[0].has_no_verdict):
        return ""
    judged = row.comparisons[0]
    difference = difference_text(judged) or f"{judged.difference:+.2g}"
    return (
        f"its {judged.title} differs from O0's by {difference}, and the name does not say whether "
        "lower or higher is better"
    )


def _undecided(candidates: Sequence[Row], kind: Kind, resume_options: str) -> str:
    """The text if nothing is proven: what is known of speed and accuracy, and what settles it."""
    faster = pace.worthwhile(candidates)
    first = max(faster, key=lambda row: row.decisive.median, default=None)
    first = first or _with_most_fp32(candidates, kind)
    others = [row for row in candidates if row not in (first, *faster)]
    speed = f"{_name(first)} is {pace.speed_text(first) or 'not timed'}"
    if others:
        speed += f"; {_names(others)} cannot be told apart from O0 either"
    good = [row for row in candidates if not open_question(row)[0]]
    what, cure = open_question(first) if faster or not good else ("", "")
    known = [f"{_names(good)} as O0 ({_accuracy(good[0].comparisons[0])})"] if good else []
    accuracy = "; ".join([*known, *([f"{_name(first)}: {what}"] if what else [])])
    rounds = first.speeds.n + ROUNDS if first.pace == pace.UNKNOWN else 0 if faster else ROUNDS
    seeds = re.match(r"--seeds (\d+)", cure)
    is_more = rounds > int(seeds[1] if seeds else 0)  # each seed is a round
    options = " ".join(filter(None, (f"--rounds {rounds}" * is_more, cure)))
    advice = f"Stay with O0 for now. Speed: {speed}. Accuracy: {accuracy}."
    options = resume_options or (options and f"--resume {options}")
    idle = ", on an idle machine" if not faster and first.pace == pace.UNKNOWN else ""
    return f"{advice} To settle it{idle}: {options}." if options else advice


def _none_faster(rows: Sequence[Row], base: Row) -> str:
    """The text if no row is fast enough; it names the row that saves most memory, if any."""
    fastest = max(rows, key=lambda row: row.decisive.median)
    advice = (
        f"Stay with O0: no row is {pace.WORTHWHILE:g} times as fast. The fastest, {fastest.name}, "
        f"is {pace.speed_text(fastest)}."
    )
    accurate = [row for row in rows if not worse(row) and not no_direction(row)]
    return advice + _smallest(accurate, base)


def _accuracy(judged: Comparison) -> str:
    """The accuracy beside O0's: `test accuracy -0.0017 [-0.0048, +0.0014], below the 1 % ...`."""
    if not judged.scatter and not judged.difference:
        return f"{judged.title} the same with each of {judged.n} seeds"
    if at_worst(judged) <= 0:
        return f"{judged.title} {difference_text(judged)}, no worse than O0's"
    return f"{judged.title} {difference_text(judged)}, below the {margin_text(judged)} that matters"


def _none_as_accurate(rows: Sequence[Row]) -> str:
    """The text if all rows that may be faster are worse, with the difference of the fastest."""
    row = max(rows, key=lambda row: row.decisive.median if row.pace else 0.0)
    facts = "; ".join(filter(None, (pace.speed_text(row), *map(quality_text, worse(row)))))
    return f"Stay with O0: no row that may be faster is as accurate. {_name(row)}: {facts}."


def _remedy(quantity: Comparison) -> str:
    """How an untested quantity can be tested, if not by an option of the sweep."""
    if quantity.is_uneven:
        return ": have the script report a metric, by log_metrics or --metric"
    if quantity.untested == SAME_SEEDS:
        return ": have the seed reach the script, by {seed} among its arguments or --override-seeds"
    return ""


def _seeds_for(judged: Comparison) -> int | None:
    """How many seeds would end the confidence interval within the margin; None: too many.

    If further differences scatter as these do, that many seeds succeed with the probability `POWER`
    of the tests.
    """
    room = judged.matters - (judged.difference if judged.better == "lower" else -judged.difference)
    numbers = range(judged.n + 1, MOST_SEEDS + 1)
    return next((n for n in numbers if smallest_detectable(judged.scatter, n) <= room), None)


def _with_most_fp32(rows: Sequence[Row], kind: Kind) -> Row:
    """The row with most FP32; of equal ones the script's own kind of AMP, then the fastest."""
    own_level = "autocast" if kind.lacks_initialize else "O1"

    def order(row: Row) -> tuple[int, bool, float]:
        speed = row.decisive.median if row.pace else 0
        return _IN_HALF[_level(row)], _level(row) != own_level, -speed

    return min(rows, key=order)


def _level(row: Row) -> str:
    """The opt level without "+tf32" and settings."""
    return re.split(r"[-+]", row.opt_level)[0]


def _why_nothing(rows: Sequence[Row]) -> str:
    if not rows:
        return "no run has ended"
    if all(row.outcome != "baseline" for row in rows):
        base = next((row for row in rows if row.label == BASE.label), None)
        return f"{base.status} at O0" if base else "O0 has not run"
    return "O0 alone has run" if len(rows) == 1 else "no row beside O0 has gone well"


def _memory(row: Row, base: Row) -> str:
    """`38 % less memory`; "" where it is as much, or unknown."""
    if not (row.memory_bytes and base.memory_bytes):
        return ""
    percent = round(100 * (1 - row.memory_bytes / base.memory_bytes))
    return f"{abs(percent)} % {'less' if percent > 0 else 'more'} memory" if percent else ""


def _smallest(rows: Sequence[Row], base: Row) -> str:
    """A sentence on the row that saves most memory; "" if none does."""
    sizes = [row for row in rows if row.memory_bytes and base.memory_bytes]
    least = min(sizes, key=lambda row: row.memory_bytes, default=None)
    if least is None or least.memory_bytes > _LESS_MEMORY * base.memory_bytes:
        return ""
    at = pace.speed_text(least) or "its speed was not measured"
    return f" {_name(least)} takes {_memory(least, base)}: {at}."


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(map(_name, rows))


def _name(row: Row) -> str:
    return f"{row.opt_level} in {row.dtype}"
