"""The verdicts: does a row reach O0's accuracy?

Accuracy is compared by paired t tests over seeds, corrected over the rows (`paired.py`).
"Within seed noise" means that the test found no difference.  A difference may still exist: the
95 % confidence interval says how large it can be, and the verdict how large a one would have
been seen.  Each quantity of a row is tested, and the verdict is about one of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence

from ampatch.sweep.report import margin, numbers, pace
from ampatch.sweep.report.margin import LOSS, ONE_PERCENT, Margin
from ampatch.sweep.report.paired import LEVEL, POWER, available, holm, paired, smallest_seen
from ampatch.sweep.report.results import Comparison, Row

FAR = 0.1  # of O0's score
Samples = dict[str, dict[int, float]]  # by quantity one value for each seed

_LOWER = {"loss", "error", "err", "perplexity", "ppl", "mse", "mae", "rmse", "nll", "bpc", "bpb"}
_LOWER |= {"wer", "cer", "fid", "bits", "seconds", "time"}


METHOD = (
    "Accuracy: one value per seed; a row's and O0's with the same seed are a pair. Paired "
    "two-sided t test of the differences (Student, Biometrika 6, 1908). p is corrected over "
    f"the rows by Holm's method (Scand. J. Statist. 6, 1979), at {100 * LEVEL:.0f} % for all "
    "rows together. In brackets the 95 % confidence interval of the mean difference, of each "
    'row by itself. "Within seed noise" means that the test found no difference; "worse '
    'by less than matters", that it found one whose interval ends within the margin. The '
    "difference that would have been seen is the one that the test finds with probability "
    f"{100 * POWER:.0f} %: ncp * s / sqrt(n), by the noncentral t distribution (Cohen, "
    "Statistical Power Analysis, 1988). Where the difference is one number with each seed, the "
    "samples are compared as unpaired; where both have one value with all seeds, there is no p."
)
"""How accuracy is compared with O0's, for readers of the figures."""


def compare(
    sample: Samples,
    base: Samples,
    judged: str | None,
    better: Mapping[str, str],
    seeds_matter: bool = True,
    matters: Margin = ONE_PERCENT,
) -> list[Comparison]:
    """Comparisons of each quantity that both have with some seed, the judged one first.

    `matters` is the smallest difference that does.  They have no outcome until `corrected` has
    seen those of all rows.
    """
    names = [name for name in sample if sample[name].keys() & base.get(name, {}).keys()]
    first = judged if judged in names else next(iter(names), None)
    names.sort(key=lambda name: name != first)
    compared = [
        _compared(name, sample[name], base[name], better.get(name) or direction(name), seeds_matter)
        for name in names
    ]
    return [
        dataclasses.replace(one, matters=matters.beside(one.base_mean, is_judged=number == 0))
        for number, one in enumerate(compared)
    ]


def corrected(compared: Sequence[Sequence[Comparison]]) -> list[list[Comparison]]:
    """The comparisons of all rows, with each quantity's p corrected over the rows, and outcomes."""
    tested: dict[str, list[Comparison]] = {}
    for one in itertools.chain(*compared):
        if one.p is not None:
            tested.setdefault(one.name, []).append(one)
    judged = {}
    for ones in tested.values():
        for one, p in zip(ones, holm([one.p for one in ones if one.p is not None])):
            judged[id(one)] = _judged(one, p, len(ones))
    return [[judged.get(id(one), one) for one in of_row] for of_row in compared]


def direction(name: str) -> str:
    """Whether a metric of this name is better when "higher" or "lower"."""
    return "lower" if _LOWER & set(re.split(r"[^a-z]+", name.lower())) else "higher"


def outcome_of(is_base: bool, failed: bool) -> str:
    """The outcome of a row that has not been compared."""
    if failed:
        return "failed"
    return "baseline" if is_base else "untested"


def judged_row(row: Row, compared: Sequence[Comparison]) -> Row:
    """The row with its comparisons, its outcome, and its verdict in words."""
    outcome = compared[0].outcome if compared and row.outcome == "untested" else row.outcome
    row = dataclasses.replace(row, comparisons=list(compared), outcome=outcome)
    said = (pace.in_words(row), _quality(row))
    ordered = said[::-1] if row.outcome == "baseline" else said
    return dataclasses.replace(row, verdict="; ".join(filter(None, ordered)))


def _compared(
    name: str, sample: dict[int, float], base: dict[int, float], better: str, seeds_matter: bool
) -> Comparison:
    seeds = sorted(sample.keys() & base.keys())
    ours, theirs = [sample[seed] for seed in seeds], [base[seed] for seed in seeds]
    mean, base_mean = numbers.mean(ours), numbers.mean(theirs)
    plain = Comparison(
        name=name, better=better, n=len(seeds), mean=mean, sd=_sd(ours),
        base_mean=base_mean, base_sd=_sd(theirs), difference=mean - base_mean,
    )  # fmt: skip
    untested = _reason_against_a_test([*ours, *theirs], len(seeds), seeds_matter)
    if untested:
        lost = all(map(math.isfinite, theirs)) and not all(map(math.isfinite, ours))
        outcome = "worse" if lost else "untested"
        return dataclasses.replace(plain, untested=untested, outcome=outcome)
    found = paired(ours, theirs)
    return dataclasses.replace(
        plain, difference=found.difference, scatter=found.sd, p=found.p,
        low=found.low, high=found.high,
    )  # fmt: skip


def _reason_against_a_test(values: Sequence[float], seeds: int, seeds_matter: bool) -> str:
    if not all(map(math.isfinite, values)):
        return "not all values are finite"
    if seeds < 2:
        return "one seed"
    if not seeds_matter:
        return "O0 is the same with each seed"
    return "" if available() else "scipy is not installed"


def _judged(one: Comparison, p: float, rows: int) -> Comparison:
    """A comparison with its corrected p, what it would have seen, and its outcome."""
    smallest = smallest_seen(one.scatter, one.n, rows) if one.scatter else None
    outcome = margin.outcome(one, p)
    return dataclasses.replace(one, corrected_p=p, smallest=smallest, outcome=outcome)


def _is_far(one: Comparison) -> bool:
    """Whether a score that could not be tested is so low that no test is needed to leave it.

    Losses near 0 differ by such factors from seed to seed.
    """
    lost = one.base_mean - one.mean
    return one.p is None and one.better == "higher" and lost > FAR * abs(one.base_mean)


def _quality(row: Row) -> str:
    if row.start and row.outcome != "failed":
        what = "the baseline, but" if row.outcome == "baseline" else "accuracy not compared:"
        return f"{what} it does not start as the others: {row.start}"
    if row.outcome == "baseline":
        return "the baseline"
    if row.outcome == "failed":
        bad = row.runs - row.good_runs
        return row.status + (f" ({bad} of {row.runs} runs)" if row.runs > 1 else "")
    if not row.comparisons:
        return "accuracy not compared"
    said = quality_text(row.comparisons[0])
    loss = next((one for one in row.comparisons[1:] if one.name == LOSS), None)
    if loss is None or loss.p is None:
        return said
    p = "" if never_varies(loss) else f", p={loss.corrected_p:.2g}"
    return f"{said}; {LOSS} {outcome_text(loss)}: difference {difference_text(loss)}{p}"


def outcome_text(one: Comparison) -> str:
    """How a quantity stands, for a table: `within seed noise`."""
    texts = {"within": "within seed noise", "small": "worse by less than matters"}
    return texts.get(one.outcome, one.outcome)


def quality_text(one: Comparison) -> str:
    """How a quantity compares with that of O0, in words."""
    against = f"{one.name} {one.mean:.4g} against {one.base_mean:.4g}"
    if one.p is None:
        far = ", but far below" if _is_far(one) else ""
        return f"{against}, not tested ({one.untested}){far}"
    if not one.difference and not one.scatter:
        return f"equal to O0 with each of {one.n} seeds: {one.name} {one.mean:.4g}"
    p = "" if never_varies(one) else f", p={one.corrected_p:.2g}"
    detail = f"{difference_text(one)}{p}, {one.n} seeds"
    if one.outcome == "small":
        return f"worse by less than matters ({one.matters:.2g}): {against}, difference {detail}"
    if one.outcome != "within":
        return f"{one.outcome} than O0: {against}, difference {detail}"
    seen = f"; a difference of {one.smallest:.2g} would have been seen" if one.smallest else ""
    return f"within seed noise of O0: {against}, difference {detail}{seen}"


def difference_text(one: Comparison) -> str:
    """The difference to O0 with its interval: `+0.003 [-0.004, +0.009]`; "" if not tested."""
    if one.p is None:
        return ""
    if not one.scatter:
        return f"{one.difference:+.2g} with each seed" if one.difference else "0 with each seed"
    return f"{one.difference:+.2g} [{one.low:+.2g}, {one.high:+.2g}]"


def never_varies(one: Comparison) -> bool:
    """Whether both have one value with every seed.  Where it is not the same, a p says nothing."""
    return not one.sd and not one.base_sd


def p_text(one: Comparison, p: float | None) -> str:
    """A p of `one`, for a table."""
    untold = bool(one.difference) and never_varies(one)
    return numbers.MISSING if p is None or untold else f"{p:.2g}"


def mean_and_sd(mean: float, sd: float | None, n: int) -> str:
    """`0.9889 ± 0.002`; where all of `n` values are one number, this one."""
    if sd is None:
        return f"{mean:.4g}"
    return f"{mean:.4g} ± {sd:.2g}" if sd else f"{mean:.4g} with each of {n} seeds"


def _sd(values: Sequence[float]) -> float | None:
    """The standard deviation; None of a single value, and where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values)
