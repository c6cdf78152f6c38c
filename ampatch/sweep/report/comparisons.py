"""The verdicts: does a row reach O0's accuracy?

Each quantity of a row is compared by the test of `paired_test.py`.  The verdict is about the judged
one.  "Within seed noise" means that the test found no difference; the interval shows how large a
difference may still be.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from pandas import DataFrame, Series

from ampatch.sweep.report import margin, numbers, pace
from ampatch.sweep.report.directions import direction
from ampatch.sweep.report.margin import LOSS, ONE_PERCENT, Margin
from ampatch.sweep.report.paired_test import holm, paired, smallest_detectable
from ampatch.sweep.report.results import Comparison, Row
from ampatch.sweep.trial import BASE

Samples = dict[tuple[str, str], DataFrame]
"""By row and quantity: for each seed, the index, one value and how many steps it took."""
ONE_SEED, SAME_SEEDS = "one seed", "O0 is the same with each seed"  # why there is no test
UNEVEN = 1.02  # times as many steps: then last losses are not compared


def compare(
    samples: Samples,
    row: str,
    judged: str | None,
    better: Mapping[str, str],
    seeds_matter: bool = True,
    matters: Margin = ONE_PERCENT,
) -> list[Comparison]:
    """Comparisons of each quantity that a row and O0 have for a common seed, the judged one first.

    `matters` is the margin.  Tested ones have no outcome until `corrected` gets those of all rows.
    """
    pairs = {
        name: sample.merge(samples[BASE.label, name], on="seed", suffixes=("", "_of_base"))
        for (label, name), sample in samples.items()
        if label == row and (BASE.label, name) in samples
    }
    names = [name for name, pair in pairs.items() if len(pair)]
    first = judged if judged in names else next(iter(names), None)
    names.sort(key=lambda name: name != first)
    compared = [
        _compared(name, pairs[name], way, seeds_matter)
        for name, way in directions(names, better).items()
    ]
    return [
        dataclasses.replace(quantity, matters=matters.in_units_of(quantity.base_mean, number == 0))
        for number, quantity in enumerate(compared)
    ]


def directions(names: Iterable[str], asked: Mapping[str, str]) -> dict[str, str | None]:
    """The direction of each of these quantities: as `asked`, else as its name says."""
    return {name: asked.get(name) or direction(name) for name in names}


def corrected(compared: Sequence[Sequence[Comparison]]) -> list[list[Comparison]]:
    """The comparisons with outcomes, and with each quantity's p corrected over the rows."""
    tested = DataFrame(
        [(id(quantity), quantity.name, quantity.p) for quantity in itertools.chain(*compared)],
        columns=["id", "name", "p"],
    ).set_index("id")
    by_name = tested.astype({"p": float}).dropna().groupby("name").p
    p, rows = by_name.transform(holm), by_name.transform("size")
    return [
        [_judged(q, p[id(q)], rows[id(q)]) if id(q) in p else q for q in of_row]
        for of_row in compared
    ]


def judged_row(row: Row, compared: Sequence[Comparison]) -> Row:
    """The row with its comparisons, its outcome, and its verdict in words."""
    outcome = compared[0].outcome if compared and row.outcome == "untested" else row.outcome
    row = dataclasses.replace(row, comparisons=list(compared), outcome=outcome)
    texts = (pace.speed_text(row), _quality(row))
    ordered = texts[::-1] if row.outcome == "baseline" else texts
    return dataclasses.replace(row, verdict="; ".join(filter(None, ordered)))


def _compared(name: str, pair: DataFrame, better: str | None, seeds_matter: bool) -> Comparison:
    """The comparison of values with O0's of the same seed."""
    ours, theirs = pair.value, pair.value_of_base
    mean, base_mean = numbers.mean(ours), numbers.mean(theirs)
    plain = Comparison(
        name=name, better=better, n=len(pair), mean=mean, sd=_sd(ours),
        base_mean=base_mean, base_sd=_sd(theirs), difference=mean - base_mean,
    )  # fmt: skip
    untested = _reason_against_a_test(name, pair, seeds_matter)
    if untested:
        diverged = all(map(math.isfinite, theirs)) and not all(map(math.isfinite, ours))
        outcome = "worse" if diverged else "untested"
        return dataclasses.replace(plain, untested=untested, outcome=outcome)
    test = paired(ours, theirs)
    return dataclasses.replace(
        plain, difference=test.difference, scatter=test.sd, p=test.p,
        low=test.low, high=test.high,
    )  # fmt: skip


def _reason_against_a_test(name: str, pair: DataFrame, seeds_matter: bool) -> str:
    if not all(map(math.isfinite, [*pair.value, *pair.value_of_base])):
        return "not all values are finite"
    factors = pair.steps / pair.steps_of_base
    if name == LOSS and not factors.between(1 / UNEVEN, UNEVEN).all():
        steps, of_base = pair.steps.median(), pair.steps_of_base.median()
        return f"it took {steps:.0f} steps and O0 {of_base:.0f}"
    if len(pair) < 2:
        return ONE_SEED
    return "" if seeds_matter else SAME_SEEDS


def _judged(quantity: Comparison, p: float, rows: int) -> Comparison:
    """A comparison with its corrected p, its outcome, and the smallest detectable difference."""
    smallest = smallest_detectable(quantity.scatter, quantity.n, rows) if quantity.scatter else None
    outcome = margin.outcome(quantity, p)
    return dataclasses.replace(quantity, corrected_p=float(p), smallest=smallest, outcome=outcome)


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
    loss = [
        quantity
        for quantity in row.comparisons[1:]
        if quantity.name == LOSS and quantity.outcome == "worse"
    ]
    return "; ".join(map(quality_text, [row.comparisons[0], *loss]))


_OUTCOMES = {
    "within": "within seed noise of O0",
    "small": "worse by less than matters",
    "better": "better than O0",
    "worse": "worse than O0",
    "different": "differs from O0",
}


def quality_text(quantity: Comparison) -> str:
    """How a quantity compares with O0's, as text."""
    against = f"{quantity.title} {quantity.mean:.4g} against {quantity.base_mean:.4g}"
    if quantity.p is None:
        return f"{against}, not tested ({quantity.untested})"
    if not quantity.difference and not quantity.scatter:
        return f"equal to O0 with each of {quantity.n} seeds: {quantity.title} {quantity.mean:.4g}"
    way = f"{quantity.better} is better" if quantity.better else "no direction"
    difference = difference_text(quantity)
    return f"{_OUTCOMES[quantity.outcome]}: {against}, difference {difference} ({way})"


def difference_text(quantity: Comparison) -> str:
    """The difference to O0 with its interval: `+0.003 [-0.004, +0.009]`; "" if not tested."""
    if quantity.p is None:
        return ""
    if not quantity.scatter:
        same = f"{quantity.difference:+.2g}" if quantity.difference else "0"
        return f"{same} with each seed"
    return f"{quantity.difference:+.2g} [{quantity.low:+.2g}, {quantity.high:+.2g}]"


def _sd(values: Series) -> float | None:
    """The standard deviation; None of a single value, and where one is not finite."""
    return values.std() if len(values) > 1 and all(map(math.isfinite, values)) else None
