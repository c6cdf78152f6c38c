"""Numbers that a script prints, found in its log by regular expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from ampatch.sweep.measure.record import Series
from ampatch.sweep.report.directions import direction

_EXPONENT = re.compile(r"(?<=[\d.])[eE][-+]?\d+\b")


def read_metrics(log: Path, patterns: Mapping[str, str]) -> dict[str, Series]:
    r"""For each pattern with a match, by name: every number its group matched.

    The group `([\d.]+)` matches 2.5 in 2.5e-05: the exponent is added to the number.
    `^` and `$` match at the begin and end of each line.  Raises `ValueError` for a match that is
    not a number.
    """
    text = log.read_bytes().decode("utf-8", "replace")
    found = {
        name: [_number(match, name, log) for match in re.finditer(pattern, text, re.MULTILINE)]
        for name, pattern in patterns.items()
    }
    return {name: Series([*range(len(one))], one) for name, one in found.items() if one}


@functools.cache
def hint(log: Path, size: int) -> tuple[str, str] | None:
    r"""A number in the output that looks like a metric, and the `--metric` that reads it.

    `acc 0.93` and `acc=acc ([\d.]+)`; None where there is none.  `size` is that of the file now.
    """
    text = log.read_bytes().decode("utf-8", "replace")
    for match in re.finditer(r"([A-Za-z][\w@-]*)(\s*[:=] *| +)\d+\.?\d*", text):
        name, between = match.groups()
        if direction(name) == "higher":
            said = re.escape(name + between).replace("\\ ", " ")
            return match[0], rf"{name}={said}([\d.]+)"
    return None


def _number(match: re.Match[str], name: str, log: Path) -> float:
    exponent = _EXPONENT.match(match.string, match.end(1))
    try:
        return float(match[1] + exponent[0] if exponent else match[1])
    except (TypeError, ValueError):
        raise ValueError(
            f"--metric {name}={match.re.pattern}: found {match[1]!r} in {match[0]!r} ({log}), "
            "expected a number."
        ) from None
