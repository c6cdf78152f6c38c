"""Which row is recommended, or what is missing to recommend one, as a short text.

docs/explanation/sweep_figures.md says what must be shown of a row ("What is recommended").  See
`first_loss_check.py`, `margin.py` and `pace.py` for the tests of first losses, accuracy and speed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ampatch.sweep.kinds import UNKNOWN_KIND, Kind
from ampatch.sweep.options import ROUNDS
from ampatch.sweep.report import comparisons, margin, pace
from ampatch.sweep.report.directions import direction_options
from ampatch.sweep.report.paired_test import MIN_TEST_SEEDS, smallest_detectable
from ampatch.sweep.report.results import Comparison, Row
from ampatch.sweep.trial import BASE

NOTHING_YET = "Nothing to compare yet"
MAX_SEEDS = 50  # more are never suggested
_MAX_MEMORY_RATIO = 0.95  # relative to O0's memory; only less memory is mentioned
_HALF_RANK = {"O0": 0, "autocast": 1, "O1": 1, "O2": 2, "O3": 3}  # higher if more runs in half


@dataclass(frozen=True)
class MissingEvidence:
    """What is not known of a row's accuracy, and the options that would settle it."""

    text: str
    seeds: int = 0  # number of seeds to run; 0 if more seeds do not help
    direction_options: str = ""  # options that give the judged metric a direction

    @property
    def options(self) -> str:
        seeds = f"--seeds {self.seeds} " if self.seeds else ""
        return f"{seeds}{self.direction_options}".strip()


def recommendation(rows: Sequence[Row], kind: Kind = UNKNOWN_KIND, resume_options: str = "") -> str:
    """The recommended row for this kind of script, and why.

    If none is proven: what is known, and which options would settle it.  `resume_options` continue
    a sweep whose budget was too small to test accuracy.
    """
    unlike = [row for row in rows if row.start]
    if unlike:
        example = next((row for row in unlike if row.outcome != "baseline"), unlike[0])
        return (
            "None: the rows' first losses differ by more than rounding, so they cannot be compared."
            f" {_name(example)} has a {example.start}."
        )
    if not anything_compared(rows):
        return f"{NOTHING_YET}: {_reason_for_nothing(rows)}."
    base = next(row for row in rows if row.outcome == "baseline")
    comparable = [row for row in rows if row.outcome not in ("baseline", "failed")]
    maybe_faster = [row for row in comparable if pace.may_be_worthwhile(row)]
    candidates = [row for row in maybe_faster if not margin.worse_comparisons(row)]
    if maybe_faster and not candidates:
        return _none_as_accurate_text(maybe_faster)
    if not candidates:
        return _none_faster_text([row for row in comparable if row.pace], base)
    proven = [row for row in pace.worthwhile_rows(candidates) if missing_evidence(row) is None]
    if not proven:
        return _undecided_text(candidates, kind, resume_options)
    fastest = max(proven, key=lambda row: row.decisive.median)
    about_as_fast = [row for row in proven if not pace.is_surely_faster(fastest, row)]
    best = _with_most_fp32(about_as_fast, kind)
    rivals = [row for row in about_as_fast if row.decisive.median > best.decisive.median]
    advice = f"Use {_name(best)}: {pace.speed_text(best)}; {_accuracy_text(best.comparisons[0])}."
    memory = _memory_text(best, base)
    clauses = [f"It takes {memory} than O0"] if memory else []
    if rivals:
        clauses.append(f"{_names(rivals)} may be as fast or faster")
    return f"{advice} {', and '.join(clauses)}." if clauses else advice


def anything_compared(rows: Sequence[Row]) -> bool:
    """Whether O0 and another row have good runs, which can be compared."""
    outcomes = {row.outcome for row in rows}
    return "baseline" in outcomes and bool(outcomes - {"baseline", "failed"})


def missing_evidence(row: Row) -> MissingEvidence | None:
    """What must still be shown before a row counts as accurate as O0; None if nothing."""
    if not row.comparisons:
        if row.steps:
            return MissingEvidence("no loss or metric was compared with O0's")
        return MissingEvidence("it was only timed", MIN_TEST_SEEDS)
    judged = row.comparisons[0]
    if judged.has_no_verdict:
        seeds = MIN_TEST_SEEDS if judged.untested == comparisons.ONE_SEED else 0
        return MissingEvidence(direction_unknown(row), seeds, direction_options(judged.name))
    untested = margin.first_untested(row)
    if untested is not None:
        seeds = MIN_TEST_SEEDS if untested.untested == comparisons.ONE_SEED else 0
        text = f"its {untested.title} is not tested ({untested.untested}){_remedy(untested)}"
        return MissingEvidence(text, seeds)
    n, matters = judged.n, f"{judged.matters:.2g}"
    if not judged.scatter:
        if not margin.is_within_margin(judged):
            offset_text = f"its {judged.title} differs by {judged.difference:+.2g}"
            text = f"{offset_text} with each of {n} seeds, and {matters} matters (--margin)"
            return MissingEvidence(text, n + 2)
        difference = f"the difference in {judged.title}"
        text = f"{n} seeds are too few, although {difference} is the same with each"
        return MissingEvidence(text, MIN_TEST_SEEDS) if n < MIN_TEST_SEEDS else None
    if margin.is_within_margin(judged):
        return None
    text = (
        f"with {n} seeds the 95 % interval of its {judged.title} reaches "
        f"{margin.worst_difference(judged):.2g} to the worse side of O0's, beyond the margin of "
        f"{matters} (--margin)"
    )
    seeds = _seeds_for(judged)
    if not seeds:
        text += f"; even {MAX_SEEDS} seeds with this scatter would not bring it within the margin"
    return MissingEvidence(text, seeds)


def direction_unknown(row: Row) -> str:
    """How the judged metric differs from O0's, if it has no direction; "" if it has one."""
    if not (row.comparisons and row.comparisons[0].has_no_verdict):
        return ""
    judged = row.comparisons[0]
    difference = comparisons.difference_text(judged) or f"{judged.difference:+.2g}"
    return (
        f"its {judged.title} differs from O0's by {difference}, and the name does not say whether "
        "lower or higher is better"
    )


def _undecided_text(candidates: Sequence[Row], kind: Kind, resume_options: str) -> str:
    """The text if nothing is proven: what is known of speed and accuracy, and what settles it."""
    faster = pace.worthwhile_rows(candidates)
    fastest = max(faster, key=lambda row: row.decisive.median, default=None)
    row = fastest or _with_most_fp32(candidates, kind)
    speed = f"{_name(row)} is {pace.speed_text(row) or 'not timed'}"
    not_faster = [other for other in candidates if other not in (row, *faster)]
    if not_faster:
        speed += f"; not shown to be faster than O0: {_names(not_faster)}"
    accurate = [other for other in candidates if missing_evidence(other) is None]
    missing = missing_evidence(row) if faster or not accurate else None
    facts = []
    if accurate:
        example = _accuracy_text(accurate[0].comparisons[0])
        facts.append(f"{_names(accurate)}: as accurate as O0 ({example})")
    if missing:
        facts.append(f"{_name(row)}: {missing.text}")
    advice = f"Stay with O0 for now. Speed: {speed}. Accuracy: {'; '.join(facts)}."
    is_noisy = row.pace == pace.UNCLEAR
    rounds = 0 if faster else ROUNDS
    if is_noisy:
        rounds = row.speeds.n + ROUNDS
    options = missing.options if missing else ""
    if rounds > (missing.seeds if missing else 0):  # each seed is a round
        options = f"--rounds {rounds} {options}".strip()
    options = resume_options or (options and f"--resume {options}")
    idle = ", on an idle machine" if not faster and is_noisy else ""
    return f"{advice} To settle it{idle}: {options}." if options else advice


def _none_faster_text(rows: Sequence[Row], base: Row) -> str:
    """The text if no row is fast enough; it names the row that saves most memory, if any."""
    fastest = max(rows, key=lambda row: row.decisive.median)
    advice = (
        f"Stay with O0: no row is at least {pace.MIN_SPEEDUP:g} times as fast. The fastest, "
        f"{fastest.name}, is {pace.speed_text(fastest)}."
    )
    accurate = [
        row for row in rows if not margin.worse_comparisons(row) and not direction_unknown(row)
    ]
    return advice + _least_memory_text(accurate, base)


def _accuracy_text(judged: Comparison) -> str:
    """The difference from O0: `test accuracy -0.0017 [-0.0048, +0.0014], below the 1 % ...`."""
    if not judged.scatter and not judged.difference:
        return f"{judged.title} the same with each of {judged.n} seeds"
    difference = f"{judged.title} {comparisons.difference_text(judged)}"
    if margin.worst_difference(judged) <= 0:
        return f"{difference}, no worse than O0's"
    return f"{difference}, below the {margin.margin_text(judged)} that matters"


def _none_as_accurate_text(rows: Sequence[Row]) -> str:
    """The text if all rows that may be faster are worse, with the difference of the fastest."""
    row = max(rows, key=lambda row: row.decisive.median if row.pace else 0.0)
    texts = (pace.speed_text(row), *map(comparisons.comparison_text, margin.worse_comparisons(row)))
    facts = "; ".join(filter(None, texts))
    return f"Stay with O0: no row that may be faster is as accurate. {_name(row)}: {facts}."


def _remedy(untested: Comparison) -> str:
    """What makes an untested quantity testable, other than more seeds; "" if unknown."""
    if untested.is_uneven:
        return ": have the script report a metric, by log_metrics or --metric"
    if untested.untested == comparisons.SEEDS_HAVE_NO_EFFECT:
        return ": have the seed reach the script, by {seed} among its arguments or --override-seeds"
    return ""


def _seeds_for(judged: Comparison) -> int:
    """How many seeds would bring the confidence interval within the margin; 0 if too many.

    If further differences have the same standard deviation, the interval then ends within the
    margin with probability `POWER`.
    """
    room = judged.matters - (judged.difference if judged.better == "lower" else -judged.difference)
    seed_counts = range(judged.n + 1, MAX_SEEDS + 1)
    return next((n for n in seed_counts if smallest_detectable(judged.scatter, n) <= room), 0)


def _with_most_fp32(rows: Sequence[Row], kind: Kind) -> Row:
    """The row that computes most in FP32; among equals, first the script's own AMP, then speed."""
    script_level = "autocast" if kind.lacks_initialize else "O1"

    def order(row: Row) -> tuple[int, bool, float]:
        level = re.split(r"[-+]", row.opt_level)[0]  # without "+tf32" and settings
        speed = row.decisive.median if row.pace else 0
        return _HALF_RANK[level], level != script_level, -speed

    return min(rows, key=order)


def _reason_for_nothing(rows: Sequence[Row]) -> str:
    if not rows:
        return "no run has ended"
    if all(row.outcome != "baseline" for row in rows):
        base = next((row for row in rows if row.label == BASE.label), None)
        return f"{base.status} at O0" if base else "O0 has not run"
    return "O0 alone has run" if len(rows) == 1 else "no row other than O0 ran without a failure"


def _memory_text(row: Row, base: Row) -> str:
    """`38 % less memory`; "" if the row takes as much as O0, or if that is unknown."""
    if not (row.memory_bytes and base.memory_bytes):
        return ""
    percent = round(100 * (1 - row.memory_bytes / base.memory_bytes))
    return f"{abs(percent)} % {'less' if percent > 0 else 'more'} memory" if percent else ""


def _least_memory_text(rows: Sequence[Row], base: Row) -> str:
    """A sentence on the row that saves most memory; "" if none does."""
    measured = [row for row in rows if row.memory_bytes and base.memory_bytes]
    least = min(measured, key=lambda row: row.memory_bytes, default=None)
    if least is None or least.memory_bytes > _MAX_MEMORY_RATIO * base.memory_bytes:
        return ""
    speed = pace.speed_text(least) or "its speed was not measured"
    return f" {_name(least)} takes {_memory_text(least, base)}: {speed}."


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(map(_name, rows))


def _name(row: Row) -> str:
    return f"{row.opt_level} in {row.dtype}"
