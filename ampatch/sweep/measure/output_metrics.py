"""Numbers that a script prints, found in its log by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ampatch.sweep.measure.record import Series

_EXPONENT = re.compile(r"(?<=[\d.])[eE][-+]?\d+\b")


def read_metrics(log: Path, patterns: Mapping[str, str]) -> dict[str, Series]:
    r"""For each pattern with a match, by name: every number its group matched.

    Of 2.5e-05 a group `([\d.]+)` matches 2.5: the exponent is part of the number all the same.
    `^` and `$` match at the begin and end of each line.  Raises `ValueError` for a match that is
    not a number.
    """
    text = log.read_bytes().decode("utf-8", "replace")
    found = {
        name: [_number(match, name, log) for match in re.finditer(pattern, text, re.MULTILINE)]
        for name, pattern in patterns.items()
    }
    return {name: Series([*range(len(one))], one) for name, one in found.items() if one}


def _number(match: re.Match[str], name: str, log: Path) -> float:
    exponent = _EXPONENT.match(match.string, match.end(1))
    try:
        return float(match[1] + exponent[0] if exponent else match[1])
    except (TypeError, ValueError):
        raise ValueError(
            f"--metric {name}={match.re.pattern}: found {match[1]!r} in {match[0]!r} ({log}), "
            "expected a number."
        ) from None
