"""Types of options: functions from text to a value, for argparse.

argparse makes an error message of a `ValueError` and of an `ArgumentTypeError`.
"""

from __future__ import annotations

from argparse import ArgumentTypeError


def positive_count(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is not above 0")
    return number


def positive_seconds(text: str) -> float:
    """A time above 0."""
    seconds = float(text)
    if not seconds > 0:
        raise ArgumentTypeError(f"{text} is not above 0")
    return seconds


def percentage(text: str) -> float:
    """A number from 0 to below 100."""
    number = float(text)
    if not 0 <= number < 100:
        raise ArgumentTypeError(f"{text} is not at least 0 and below 100")
    return number


def name_list(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def name_and_value(text: str) -> tuple[str, str]:
    """`NAME=VALUE`, split at the first `=`."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value
