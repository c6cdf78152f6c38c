"""Which difference from O0 matters, and the rule for "worse" of `ampatch sweep` and `tune`.

A quantity is worse if a test shows it (`paired_test.py`) and its 95 % interval reaches beyond the
margin.  If the interval ends within the margin, the quantity is worse by less than matters, however
small its p is: with more seeds the p of any difference becomes small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampatch.sweep.report.paired_test import LEVEL
from ampatch.sweep.report.results import Comparison, Row

LOSS = "last loss"


@dataclass(frozen=True)
class Margin:
    """The smallest difference that matters: a number or, with `is_share`, a share of O0's value."""

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

    def in_units_of(self, base_mean: float, is_judged: bool = True) -> float:
        """The margin in units of a quantity with this mean at O0.

        A number is in units of the judged quantity; for others it is then 1 % of O0's value.
        """
        if self.is_share:
            return self.value * abs(base_mean)
        return self.value if is_judged else ONE_PERCENT.in_units_of(base_mean)


ONE_PERCENT = Margin()


def outcome(quantity: Comparison, p: float) -> str:
    """The outcome of a tested quantity with this corrected p: "within", "better", "worse", "small"
    (worse by less than matters), or "different" if it has no direction.
    """
    if p >= LEVEL:
        return "within"
    if quantity.better is None:
        return "different"
    if (quantity.difference > 0) == (quantity.better == "higher"):
        return "better"
    return "small" if is_within_margin(quantity) else "worse"


def is_within_margin(quantity: Comparison) -> bool:
    """Whether the interval of a tested quantity ends within the margin."""
    return at_worst(quantity) <= quantity.matters


def at_worst(quantity: Comparison) -> float:
    """How much worse the quantity is at the worse end of its interval.

    Without scatter the interval is the difference alone.  Below 0 if the whole interval is better.
    Raises `ValueError` if the quantity has no direction.
    """
    if quantity.has_no_verdict:
        raise ValueError(f"{quantity.name}: expected a direction, as it differs from O0's.")
    low, high = quantity.low, quantity.high
    if not quantity.scatter:
        low = high = quantity.difference
    return high if quantity.better == "lower" else -low


def margin_text(quantity: Comparison) -> str:
    """The margin as text: `1 %` if that is a round number, else in units of the quantity."""
    percent = 100 * quantity.matters / abs(quantity.base_mean or math.inf)
    is_round = math.isclose(percent, float(f"{percent:.2g}"), rel_tol=1e-9)
    return f"{percent:.2g} %" if is_round and percent else f"{quantity.matters:.2g}"


def deciding(row: Row) -> list[Comparison]:
    """The quantities that decide about a row: the judged one, and the last loss if comparable."""
    loss = (q for q in row.comparisons[1:] if q.name == LOSS and not q.is_uneven)
    return [*row.comparisons[:1], *loss]


def first_untested(row: Row) -> Comparison | None:
    """The first deciding quantity that no test compares; None: all are tested."""
    return next((quantity for quantity in deciding(row) if quantity.outcome == "untested"), None)


def worse(row: Row) -> list[Comparison]:
    """The deciding quantities that are worse, by a test or because they are not finite."""
    return [quantity for quantity in deciding(row) if quantity.outcome == "worse"]
