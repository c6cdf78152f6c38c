"""Formats numbers as text, in the same form in every table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence

MISSING = "-"
_MIN_PLAIN = 1e-3  # smaller numbers are written in scientific form: four decimals show little
_MAX_PLAIN = 1e7  # larger numbers are written in scientific form
_SMALL_RATIO = 0.1  # smaller ratios are written with two significant digits
_MAX_DECIMALS = 6


def mean(values: Sequence[float]) -> float:
    """The mean; it may be inf or NaN, where `statistics.fmean` raises for inf with -inf."""
    if all(map(math.isfinite, values)):
        return statistics.fmean(values)
    return sum(values) / len(values)


def number(value: float | None, form: str) -> str:
    """`value` in this format; "inf" and "nan" if it is not finite."""
    if value is None:
        return MISSING
    return form.format(value) if math.isfinite(value) else str(value)


def ratio(value: float) -> str:
    """A speed with about three digits: two decimals near 1, and never "0.00"."""
    if not math.isfinite(value):
        return str(value)
    if 0 < value < _SMALL_RATIO:
        return f"{value:.1e}" if value < _MIN_PLAIN else f"{value:.2g}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def quantity_text(value: float | None) -> str:
    """A loss or a metric with four decimals; a small or large value in scientific form."""
    if value is not None and abs(value) >= _MAX_PLAIN:
        return number(value, "{:.3e}")
    is_small = value is not None and 0 < abs(value) < _MIN_PLAIN
    return number(value, "{:.2e}" if is_small else "{:.4f}")


def plus_minus(value: float | None, sd: float | None) -> str:
    """`0.976 ± 0.012`, with two digits of the standard deviation; only the mean without `sd`."""
    if value is None or not math.isfinite(value) or not sd or not math.isfinite(sd):
        return quantity_text(value)
    if max(abs(value), sd) >= _MAX_PLAIN:
        return f"{quantity_text(value)} ± {sd:.1e}"
    decimals = max(0, 1 - math.floor(math.log10(sd)))
    if decimals > _MAX_DECIMALS:
        return f"{value:.3g} ± {sd:.1e}"
    return f"{value:.{decimals}f} ± {sd:.{decimals}f}"


def setting_text(value: object) -> str:
    """A setting or a fact of any type."""
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def split_interval(text: str) -> tuple[str, str]:
    """`1.62x [1.58, 1.66]` as value and interval; the interval is "" if there is none."""
    value, bracket, interval = text.partition(" [")
    return (value, f"[{interval}") if bracket and text.endswith("]") else (text, "")


def pluralize(count: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
