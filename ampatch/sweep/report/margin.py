"""What difference from O0 matters, and the one rule for "worse" of `ampatch sweep` and `tune`.

A quantity is worse where a test shows it (`paired.py`) and its 95 % interval reaches beyond the
margin.  Where the interval ends within the margin, the quantity is worse by less than matters at
most, whatever the p: more seeds make a p smaller, and never a difference larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampatch.sweep.report.paired import LEVEL
from ampatch.sweep.report.results import Comparison, Row

LOSS = "last loss"


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

    def beside(self, base_mean: float, is_judged: bool = True) -> float:
        """The margin in units of a quantity with this mean at O0.

        A number is in units of what is judged; of anything else 1 % of O0's value matters then.
        """
        if self.is_share:
            return self.value * abs(base_mean)
        return self.value if is_judged else ONE_PERCENT.beside(base_mean)


ONE_PERCENT = Margin()


def outcome(quantity: Comparison, p: float) -> str:
    """How a tested quantity stands with this corrected p: "within", "better", "worse", "small"
    (worse by less than matters), or "different" where it has no direction.
    """
    if p >= LEVEL:
        return "within"
    if quantity.better is None:
        return "different"
    if (quantity.difference > 0) == (quantity.better == "higher"):
        return "better"
    return "small" if is_shown(quantity) else "worse"


def is_shown(quantity: Comparison) -> bool:
    """Whether the interval of a tested quantity shows that it is not worse by what matters."""
    return at_worst(quantity) <= quantity.matters


def at_worst(quantity: Comparison) -> float:
    """How much worse the quantity is at the end of its interval; of one number, by that.

    Below 0 where the whole interval is better.  Raises `ValueError` where that is unknown.
    """
    if quantity.has_no_verdict:
        raise ValueError(f"{quantity.name}: expected a direction, as it differs from O0's.")
    low, high = quantity.low, quantity.high
    if not quantity.scatter:
        low = high = quantity.difference
    return high if quantity.better == "lower" else -low


def margin_text(quantity: Comparison) -> str:
    """What matters: `1 %` where it is a round part of O0's value, else in units of the quantity."""
    percent = 100 * quantity.matters / abs(quantity.base_mean or math.inf)
    is_round = math.isclose(percent, float(f"{percent:.2g}"), rel_tol=1e-9)
    return f"{percent:.2g} %" if is_round and percent else f"{quantity.matters:.2g}"


def weighed(row: Row) -> list[Comparison]:
    """What decides about a row: the judged quantity, and the last loss after as many steps."""
    loss = (q for q in row.comparisons[1:] if q.name == LOSS and not q.is_uneven)
    return [*row.comparisons[:1], *loss]


def worse(row: Row) -> list[Comparison]:
    """What decides against a row: what is worse, by a test or because it is no number."""
    return [quantity for quantity in weighed(row) if quantity.outcome == "worse"]
