"""The margin: which difference from O0 matters, for `ampatch sweep` and `ampatch tune`.

A quantity is worse if a test shows it (`paired_test.py`) and its 95 % interval reaches beyond the
margin.  If the interval ends within the margin, its outcome is "small", however small its p is,
because with more seeds the p of any difference becomes small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampatch.sweep.report.results import Comparison, Row

LAST_LOSS = "last loss"


@dataclass(frozen=True)
class Margin:
    """The smallest difference that matters: a number, or a part of O0's value (`is_relative`)."""

    value: float = 0.01
    is_relative: bool = True

    @classmethod
    def of(cls, text: str | None) -> Margin:
        """The margin that `"1%"` or `"0.005"` says; 1 % for None.  Raises `ValueError`."""
        if text is None:
            return cls()
        number = str(text).strip()
        is_relative = number.endswith("%")
        try:
            value = float(number.removesuffix("%"))
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(
                f"--margin {text}: expected a positive number: the smallest difference that "
                'matters, in the metric\'s units ("0.005") or as a share of O0\'s value ("1%").'
            )
        return cls(value / 100 if is_relative else value, is_relative)

    def absolute(self, base_mean: float, is_judged: bool = True) -> float:
        """The margin in units of a quantity with this mean at O0.

        A margin given as a number applies to the judged quantity alone; for other quantities the
        margin is then 1 % of O0's value.
        """
        if self.is_relative:
            return self.value * abs(base_mean)
        return self.value if is_judged else ONE_PERCENT.absolute(base_mean)


ONE_PERCENT = Margin()


def is_within_margin(comparison: Comparison) -> bool:
    """Whether the interval of a tested quantity ends within the margin."""
    return worst_difference(comparison) <= comparison.matters


def worst_difference(comparison: Comparison) -> float:
    """How much worse the quantity is at the worse end of its interval.

    Without scatter the interval is the difference alone.  Below 0 if the whole interval is better.
    Raises `ValueError` if the quantity has no direction.
    """
    if comparison.has_no_verdict:
        raise ValueError(f"{comparison.name}: expected a direction, because it differs from O0's.")
    low, high = comparison.low, comparison.high
    if not comparison.scatter:
        low = high = comparison.difference
    return high if comparison.better == "lower" else -low


def margin_text(comparison: Comparison) -> str:
    """The margin as text: `1 %` if that is a round number, else in units of the quantity."""
    percent = 100 * comparison.matters / abs(comparison.base_mean or math.inf)
    is_round = math.isclose(percent, float(f"{percent:.2g}"), rel_tol=1e-9)
    return f"{percent:.2g} %" if is_round and percent else f"{comparison.matters:.2g}"


def deciding_comparisons(row: Row) -> list[Comparison]:
    """The comparisons that decide the outcome of a row: the judged one and a comparable loss."""
    losses = (c for c in row.comparisons[1:] if c.name == LAST_LOSS and not c.is_uneven)
    return [*row.comparisons[:1], *losses]


def first_untested(row: Row) -> Comparison | None:
    """The first deciding comparison without a test; None if all are tested."""
    return next((c for c in deciding_comparisons(row) if c.outcome == "untested"), None)


def worse_comparisons(row: Row) -> list[Comparison]:
    """The deciding comparisons that are worse, by a test or because a value is not finite."""
    return [c for c in deciding_comparisons(row) if c.outcome == "worse"]
