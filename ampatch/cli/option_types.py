"""Types of options: functions from text to a value, for argparse.

argparse makes an error message of an `ArgumentTypeError`.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any


def positive_count(text: str) -> int:
    """A whole number above 0."""
    number = _number(int, text, "a whole number above 0")
    if number < 1:
        raise ArgumentTypeError(f"{text} is not above 0")
    return number


def percentage(text: str) -> float:
    """A number from 0 to below 100."""
    number = _number(float, text, "percent, a number from 0 to below 100")
    if not 0 <= number < 100:
        raise ArgumentTypeError(f"{text} is not at least 0 and below 100")
    return number


def _number(convert: Callable[[str], Any], text: str, expected: str) -> Any:
    """`convert(text)`.  For a `ValueError` argparse would show the name of the function."""
    try:
        return convert(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: expected {expected}") from None


def name_and_value(metavar: str, text: str) -> tuple[str, str]:
    """`NAME=VALUE`, split at the first `=`; `metavar` is the form in the help."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        such_as = rf", such as '{name or 'acc'}={name or 'acc'}: (\S+)'"
        raise ArgumentTypeError(f"{text!r}: expected {metavar}{such_as * ('REGEX' in metavar)}")
    return name, value
