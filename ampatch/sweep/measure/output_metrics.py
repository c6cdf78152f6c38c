"""Numbers that a script prints, found in its log by regular expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from ampatch.sweep.measure.run_record import Series
from ampatch.sweep.report.directions import direction

_EXPONENT = re.compile(r"(?<=[\d.])[eE][-+]?\d+\b")
_VALIDATION_WORD = r"(?:val|valid|validation|test|testing|eval|evaluation|dev|held.?out)"
_VALIDATION = re.compile(rf"{_VALIDATION_WORD}(?![a-z])", re.IGNORECASE)
_NO_METRIC = re.compile("time|sec|duration|speed|step|epoch|batch|size|count|lr", re.IGNORECASE)
_NAME_AND_NUMBER = re.compile(
    rf"((?:\b{_VALIDATION_WORD}[ /_:-]+)?\b[A-Za-z][\w@/-]*)([\"']?\s*[:=|] *| +)\d+\.?\d*",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"\b([A-Za-z]+)( [^\n:=|,;{}]{1,60}[:=] *)\d+\.?\d*")


def read_metrics(log: Path, patterns: Mapping[str, str]) -> dict[str, Series]:
    r"""All numbers that the group of each pattern matches, by name; only patterns that match.

    If the group matches a number without its exponent, as `([\d.]+)` does in 2.5e-05, the exponent
    is added.  Characters around a number, as in `77.5%`, are removed.  `^` and `$` match at the
    begin and end of each line.  Raises `ValueError` for a match that is not a number.
    """
    text = log.read_bytes().decode("utf-8", "replace")
    numbers = {
        name: [_number(match, name, log) for match in re.finditer(pattern, text, re.MULTILINE)]
        for name, pattern in patterns.items()
    }
    return {
        name: Series([*range(len(values))], values) for name, values in numbers.items() if values
    }


@functools.cache
def metric_hint(log: Path, size: int) -> tuple[str, str] | None:
    r"""A number in the output that looks like a metric, and the `--metric` that reads it.

    For example `val_loss: 0.93` and `val_loss=val_loss: ([\d.]+)`; None if there is none.  Either
    the name of the number says that higher is better, and may begin a sentence; or the name has a
    word for validation, and the number a decimal point.  Times and counts are left out.  `size` is
    the present size of the file, for the cache.
    """
    text = log.read_bytes().decode("utf-8", "replace")
    patterns = (
        (_NAME_AND_NUMBER, _is_score),
        (_SENTENCE, _begins_with_score),
        (_NAME_AND_NUMBER, _is_of_validation),
    )
    for pattern, is_metric in patterns:
        for match in pattern.finditer(text):
            name, between = match.groups()
            if is_metric(name, match[0]):
                prefix = re.escape(re.sub("[\"']", ".", name + between)).replace("\\ ", " ")
                prefix = prefix.replace("\\.", ".")
                return match[0], rf"{'_'.join(name.split())}={prefix}([\d.]+)"
    return None


def _is_score(name: str, _: str) -> bool:
    return direction(name) == "higher"


def _begins_with_score(name: str, text: str) -> bool:
    return _is_score(name, text) and not _NO_METRIC.search(text)


def _is_of_validation(name: str, text: str) -> bool:
    return bool(_VALIDATION.match(name)) and "." in text and not _NO_METRIC.search(name)


def _number(match: re.Match[str], name: str, log: Path) -> float:
    exponent = _EXPONENT.match(match.string, match.end(1))
    try:
        number = match[1] + exponent[0] if exponent else match[1]
        return float(number.strip("%,;:()[]"))
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"--metric {name}={match.re.pattern}: found {match[1]!r} in {match[0]!r} ({log}), "
            "expected a number."
        ) from None
