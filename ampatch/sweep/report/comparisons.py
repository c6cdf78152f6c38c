"""Compares the losses and metrics of each row with O0's, and writes the row's verdict.

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

from ampatch.sweep.report import numbers, pace, paired_test
from ampatch.sweep.report.directions import direction
from ampatch.sweep.report.margin import LAST_LOSS, ONE_PERCENT, Margin, is_within_margin
from ampatch.sweep.report.results import STEPS_DIFFER_PREFIX, Comparison, Row
from ampatch.sweep.trial import BASE

Samples = dict[tuple[str, str], DataFrame]
"""Maps (row, quantity) to a frame with a line per seed: index `seed`, columns `value`, `steps`."""
ONE_SEED, SEEDS_HAVE_NO_EFFECT = "one seed", "O0 is the same with each seed"  # reasons not to test
MAX_STEP_RATIO = 1.02  # last losses are compared if the numbers of steps differ by at most this


def compare(
    samples: Samples, row: str, judged: str | None, better: Mapping[str, str],
    seeds_matter: bool = True, margin: Margin = ONE_PERCENT,
) -> list[Comparison]:  # fmt: skip
    """A comparison for each quantity that the row and O0 measured with a common seed.

    The judged one comes first.  A tested comparison gets its outcome later, from
    `with_corrected_p`, which needs the p values of all rows.
    """
    pairs = {
        name: sample.merge(samples[BASE.label, name].add_prefix("base_"), on="seed")
        for (label, name), sample in samples.items()
        if label == row and (BASE.label, name) in samples
    }
    names = [name for name, pair in pairs.items() if len(pair)]
    first = judged if judged in names else next(iter(names), None)
    names.sort(key=lambda name: name != first)
    comparisons = [
        _compare_quantity(name, pairs[name], better_direction, seeds_matter)
        for name, better_direction in resolve_directions(names, better).items()
    ]
    return [
        dataclasses.replace(
            comparison, matters=margin.absolute(comparison.base_mean, is_judged=number == 0)
        )
        for number, comparison in enumerate(comparisons)
    ]


def resolve_directions(names: Iterable[str], requested: Mapping[str, str]) -> dict[str, str | None]:
    """The direction of each of these quantities: as `requested`, else as its name says."""
    return {name: requested.get(name) or direction(name) for name in names}


def with_corrected_p(by_row: Sequence[Sequence[Comparison]]) -> list[list[Comparison]]:
    """The comparisons of each row with outcomes, and with p corrected over the rows."""
    tested = DataFrame(
        [
            (id(comparison), comparison.name, comparison.p)
            for comparison in itertools.chain(*by_row)
        ],
        columns=["id", "name", "p"],
    ).set_index("id")
    by_name = tested.astype({"p": float}).dropna().groupby("name").p
    p, num_rows = by_name.transform(paired_test.holm), by_name.transform("size")
    return [
        [_with_outcome(c, p[id(c)], num_rows[id(c)]) if id(c) in p else c for c in comparisons]
        for comparisons in by_row
    ]


def with_verdict(row: Row, comparisons: Sequence[Comparison]) -> Row:
    """The row with its comparisons, its outcome, and its verdict in words."""
    outcome = comparisons[0].outcome if comparisons and row.outcome == "untested" else row.outcome
    row = dataclasses.replace(row, comparisons=list(comparisons), outcome=outcome)
    texts = (pace.speed_text(row), _accuracy_text(row))
    ordered = texts[::-1] if row.outcome == "baseline" else texts
    return dataclasses.replace(row, verdict="; ".join(filter(None, ordered)))


def _compare_quantity(
    name: str, pair: DataFrame, better: str | None, seeds_matter: bool
) -> Comparison:
    """Compare a row's values of one quantity with O0's of the same seed."""
    values, base_values = pair.value, pair.base_value
    mean, base_mean = numbers.mean(values), numbers.mean(base_values)
    comparison = Comparison(
        name=name, better=better, n=len(pair), mean=mean, sd=_sd(values),
        base_mean=base_mean, base_sd=_sd(base_values), difference=mean - base_mean,
    )  # fmt: skip
    untested = _reason_against_a_test(name, pair, seeds_matter)
    if untested:
        diverged = all(map(math.isfinite, base_values)) and not all(map(math.isfinite, values))
        outcome = "worse" if diverged else "untested"
        return dataclasses.replace(comparison, untested=untested, outcome=outcome)
    test = paired_test.paired_t_test(values, base_values)
    return dataclasses.replace(comparison, **vars(test))


def _reason_against_a_test(name: str, pair: DataFrame, seeds_matter: bool) -> str:
    if not all(map(math.isfinite, [*pair.value, *pair.base_value])):
        return "not all values are finite"
    ratios = pair.steps / pair.base_steps
    if name == LAST_LOSS and not ratios.between(1 / MAX_STEP_RATIO, MAX_STEP_RATIO).all():
        steps, base_steps = pair.steps.median(), pair.base_steps.median()
        return f"{STEPS_DIFFER_PREFIX} {steps:.0f} steps and O0 {base_steps:.0f}"
    if len(pair) < 2:
        return ONE_SEED
    return "" if seeds_matter else SEEDS_HAVE_NO_EFFECT


def _with_outcome(comparison: Comparison, p: float, num_rows: int) -> Comparison:
    """A comparison with its corrected p, its outcome, and the smallest detectable difference."""
    scatter, n = comparison.scatter, comparison.n
    return dataclasses.replace(
        comparison,
        corrected_p=float(p),
        smallest=paired_test.smallest_detectable(scatter, n, num_rows) if scatter else None,
        outcome=_outcome(comparison, p),
    )


def _outcome(comparison: Comparison, p: float) -> str:
    """The outcome of a tested comparison with this corrected p; `Comparison` lists the outcomes."""
    if p >= paired_test.SIGNIFICANCE_LEVEL:
        return "within"
    if comparison.better is None:
        return "different"
    if (comparison.difference > 0) == (comparison.better == "higher"):
        return "better"
    return "small" if is_within_margin(comparison) else "worse"


def _accuracy_text(row: Row) -> str:
    if row.start and row.outcome != "failed":
        prefix = "the baseline, but" if row.outcome == "baseline" else "accuracy not compared:"
        return f"{prefix} its first loss differs: {row.start}"
    if row.outcome == "baseline":
        return "the baseline"
    if row.outcome == "failed":
        failed = row.runs - row.good_runs
        return row.status + (f" ({failed} of {row.runs} runs)" if row.runs > 1 else "")
    if not row.comparisons:
        return "accuracy not compared"
    judged, *others = row.comparisons
    worse_loss = [c for c in others if c.name == LAST_LOSS and c.outcome == "worse"]
    return "; ".join(map(comparison_text, [judged, *worse_loss]))


_OUTCOMES = {
    "within": "within seed noise of O0",
    "small": "worse than O0 by less than the margin",
    "better": "better than O0",
    "worse": "worse than O0",
    "different": "differs from O0",
}


def comparison_text(comparison: Comparison) -> str:
    """A comparison with O0 as text: `within seed noise of O0: accuracy 0.91 against 0.92, ...`."""
    title, mean = comparison.title, f"{comparison.mean:.4g}"
    means = f"{title} {mean} against {comparison.base_mean:.4g}"
    if comparison.p is None:
        return f"{means}, not tested ({comparison.untested})"
    if not comparison.difference and not comparison.scatter:
        return f"equal to O0 with each of {comparison.n} seeds: {title} {mean}"
    better = comparison.better
    direction_note = f"{better} is better" if better else "no known direction"
    difference = difference_text(comparison)
    return f"{_OUTCOMES[comparison.outcome]}: {means}, difference {difference} ({direction_note})"


def difference_text(comparison: Comparison) -> str:
    """The difference to O0 with its interval: `+0.003 [-0.004, +0.009]`; "" if not tested."""
    if comparison.p is None:
        return ""
    if not comparison.scatter:
        difference = f"{comparison.difference:+.2g}" if comparison.difference else "0"
        return f"{difference} with each seed"
    return f"{comparison.difference:+.2g} [{comparison.low:+.2g}, {comparison.high:+.2g}]"


def _sd(values: Series) -> float | None:
    """The standard deviation; None if there is a single value, or if a value is not finite."""
    return values.std() if len(values) > 1 and all(map(math.isfinite, values)) else None
