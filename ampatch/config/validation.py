"""Checks of single values from the user: numbers, truth values, words.

The argument `what` of each check is the call or setting with the value, such as
`"ampatch.initialize(num_losses=0)"`, and begins the error message.  A wrong type raises
`TypeError`, and a wrong value raises `ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import did_you_mean, type_name


def positive_number(
    what: str, value: Any, expected: str = "a positive number", *, or_text: bool = False
) -> float:
    """A positive finite float.  With `or_text` a string of such a number is accepted too."""
    if isinstance(value, bool) or (isinstance(value, str) and not or_text):
        raise TypeError(f"{what}: expected {expected}, got {type_name(value)}.")
    try:
        number = float(value)
    except (TypeError, ValueError):
        if isinstance(value, str):
            raise ValueError(f"{what}: expected {expected}.") from None
        raise TypeError(f"{what}: expected {expected}, got {type_name(value)}.") from None
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{what}: must be above 0 and finite; expected {expected}.")
    return number


def whole_number(what: str, value: Any, *, least: int | None = None) -> int:
    """An int of at least `least`.  Floats are refused, even without a fraction."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: expected a whole number, got {type_name(value)}.")
    number = int(value)
    if least is not None and number < least:
        raise ValueError(f"{what}: expected at least {least}.")
    return number


def truth_value(what: str, value: Any) -> bool:
    """A bool; the strings "True" and "False" are accepted too."""
    if isinstance(value, str) and value in ("True", "False"):
        return value == "True"
    if not isinstance(value, bool):
        raise TypeError(
            f"{what}: expected True or False "
            f'(or the strings "True" and "False"), got {type_name(value)}.'
        )
    return value


def known_word(what: str, value: Any, known: Sequence[str], expected: str | None = None) -> str:
    """One of the `known` words.  `expected` describes them in the error."""
    if value not in known:
        listed = " or ".join(f'"{name}"' for name in known)
        raise ValueError(
            f"{what}: expected {expected or listed}." + did_you_mean(str(value), known)
        )
    return value
