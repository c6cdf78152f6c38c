"""Which row is recommended, and what is missing where none is: in two sentences at most.

What has to be shown of a row: docs/explanation/sweep_figures.md, "What is recommended".  Whether
rows start alike is in `start_check.py`, what matters in `margin.py`, what is faster in `pace.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ampatch.sweep.kinds import UNKNOWN, Kind
from ampatch.sweep.report import pace
from ampatch.sweep.report.directions import option
from ampatch.sweep.report.judge import difference_text, quality_text
from ampatch.sweep.report.margin import at_worst, is_shown, margin_text, weighed, worse
from ampatch.sweep.report.paired import smallest_seen
from ampatch.sweep.report.results import Comparison, Row
from ampatch.sweep.trial import BASE

NOTHING_YET = "Nothing to compare yet"
MORE_SEEDS = 5  # are advised where the scatter over the seeds is not known
LEAST_SEEDS = 3  # with one and the same difference
MOST_SEEDS = 50
_LESS_MEMORY = 0.95  # relative to O0's; above it no sentence mentions memory
_HALVED = {"O0": 0, "autocast": 1, "O1": 1, "O2": 2, "O3": 3}  # how much is not in FP32


def recommendation(rows: Sequence[Row], kind: Kind = UNKNOWN) -> str:
    """What to train a script of this kind with, and why; or what is missing to say it."""
    apart = [row for row in rows if row.start]
    if apart:
        first = next((row for row in apart if row.outcome != "baseline"), apart[0])
        return (
            "None: the rows do not start alike, so they cannot be compared. "
            f"{_name(first)} has a {first.start}."
        )
    if not anything_compared(rows):
        return f"{NOTHING_YET}: {_what_lacks(rows)}."
    base = next(row for row in rows if row.outcome == "baseline")
    well = [row for row in rows if row.outcome not in ("baseline", "failed")]
    accurate = [row for row in well if not worse(row)]
    left = [row for row in well if not pace.surely_not(row)]
    fit = [row for row in left if row in accurate]
    if left and not fit:
        return _none_as_accurate(left)
    faster = pace.worthwhile(fit)
    if not faster:
        why = pace.none_recommended(fit or well, base)
        known = [row for row in accurate if not no_direction(row)]
        return why + _smaller(known, base) if why.startswith("Stay") else why
    shown = [row for row in faster if not not_shown(row)]
    if not shown:
        fastest = max(faster, key=lambda row: row.decisive.median)
        return (
            f"Not known yet: {_name(fastest)} is {pace.in_words(fastest)}, but {not_shown(fastest)}"
        )
    best, others = _with_most_fp32(shown, kind)
    said = f"Use {_name(best)}: {pace.in_words(best)}; {_accuracy(best.comparisons[0])}."
    much = _memory(best, base)
    more = [f"It takes {much} than O0"] if much else []
    if others:
        names = ", ".join(map(_name, others))
        more.append(f"{names} {'is' if len(others) == 1 else 'are'} not surely faster")
    return f"{said} {', and '.join(more)}." if more else said


def anything_compared(rows: Sequence[Row]) -> bool:
    """Whether O0 and another row have gone well, so that there is something to say of the two."""
    outcomes = {row.outcome for row in rows}
    return "baseline" in outcomes and bool(outcomes - {"baseline", "failed"})


def not_shown(row: Row) -> str:
    """What was not shown of a row's accuracy, as the end of a sentence; "" if all was."""
    if not row.comparisons:
        return "no loss or metric was compared with O0's."
    judged = row.comparisons[0]
    if judged.has_no_verdict:
        return no_direction(row) + _cure(judged)
    untested = next((one for one in weighed(row) if one.outcome == "untested"), None)
    if untested is not None:
        return f"its {untested.title} is not tested ({untested.untested}).{_cure(untested)}"
    if not judged.scatter:
        return _without_scatter(judged)
    if is_shown(judged):
        return ""
    said = (
        f"with {judged.n} seeds the 95 % interval of its {judged.title} ends "
        f"{at_worst(judged):.2g} worse than O0's, and {judged.matters:.2g} matters (--margin)."
    )
    seeds = _seeds_for(judged)
    if seeds is None:
        return f"{said} Not even {MOST_SEEDS} seeds like these would end it before that."
    return f"{said} More seeds are needed, about {seeds}: --resume --seeds {seeds}."


def no_direction(row: Row) -> str:
    """A sentence if the judged metric differs from O0's and has no direction, else ""."""
    if not (row.comparisons and row.comparisons[0].has_no_verdict):
        return ""
    one = row.comparisons[0]
    difference = difference_text(one) or f"{one.difference:+.2g}"
    return (
        f"its {one.title} differs from O0's by {difference}, and the name does not say whether "
        f"lower or higher is better: --resume {option(one.name)}."
    )


def _accuracy(one: Comparison) -> str:
    """The accuracy beside O0's: `test accuracy -0.0017 [-0.0048, +0.0014], below the 1 % ...`."""
    if not one.scatter and not one.difference:
        return f"{one.title} the same with each of {one.n} seeds"
    if at_worst(one) <= 0:
        return f"{one.title} {difference_text(one)}, no worse than O0's"
    return f"{one.title} {difference_text(one)}, below the {margin_text(one)} that matters"


def _none_as_accurate(rows: Sequence[Row]) -> str:
    """A sentence: all rows that may be faster are worse; and the fastest one's difference."""
    row = max(rows, key=lambda row: row.decisive.median if row.pace else 0.0)
    said = filter(None, (pace.in_words(row), *(quality_text(one) for one in worse(row))))
    return (
        f"Stay with O0: no row that may be faster is as accurate. {_name(row)}: {'; '.join(said)}."
    )


def _without_scatter(one: Comparison) -> str:
    """What the same difference with each seed does not show: it has no scatter to test by."""
    if not is_shown(one):
        return (
            f"its {one.title} is {one.difference:+.2g} off with each of {one.n} seeds, and "
            f"{one.matters:.2g} matters (--margin). "
            f"--resume --seeds {max(MORE_SEEDS, one.n + 3)} says more."
        )
    if one.n < LEAST_SEEDS:
        return (
            f"the same {one.title} with {one.n} seeds says little: --resume --seeds {MORE_SEEDS}."
        )
    return ""


def _cure(one: Comparison) -> str:
    if one.untested == "one seed":
        return f" More seeds are needed: --resume --seeds {MORE_SEEDS}."
    if one.untested == "O0 is the same with each seed":
        return " Have the seed reach the script: {seed} among its arguments, or --override-seeds."
    return ""


def _seeds_for(one: Comparison) -> int | None:
    """With how many seeds the interval of such differences ends within the margin.

    It does so as likely as a test finds a difference of what is left of the margin.
    """
    room = one.matters - (one.difference if one.better == "lower" else -one.difference)
    numbers = range(one.n + 1, MOST_SEEDS + 1)
    return next((n for n in numbers if smallest_seen(one.scatter, n) <= room), None)


def _with_most_fp32(shown: Sequence[Row], kind: Kind) -> tuple[Row, list[Row]]:
    """The row with most FP32 among those not told apart from the fastest; and faster rows."""
    has = "autocast" if kind.is_foreign else "O1"
    fastest = max(shown, key=lambda row: row.decisive.median)
    alike = [row for row in shown if not pace.told_apart(fastest, row)]
    best = min(
        alike, key=lambda row: (_HALVED[_level(row)], _level(row) != has, -row.decisive.median)
    )
    return best, [row for row in alike if row.decisive.median > best.decisive.median]


def _level(row: Row) -> str:
    """The opt level without "+tf32" and settings."""
    return re.split(r"[-+]", row.opt_level)[0]


def _what_lacks(rows: Sequence[Row]) -> str:
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


def _smaller(fit: Sequence[Row], base: Row) -> str:
    """The row that saves most memory, where no row saves time."""
    sizes = [row for row in fit if row.memory_bytes and base.memory_bytes]
    least = min(sizes, key=lambda row: row.memory_bytes, default=None)
    if least is None or least.memory_bytes > _LESS_MEMORY * base.memory_bytes:
        return ""
    at = pace.in_words(least) or "its speed was not measured"
    return f" {_name(least)} takes {_memory(least, base)}: {at}."


def _name(row: Row) -> str:
    return f"{row.opt_level} in {row.dtype}"
