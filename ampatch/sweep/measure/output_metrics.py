"""Numbers that a script prints, found in its log by regular expressions."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from pathlib import Path

from ampatch.sweep.measure.record import Measured, Series

_EXPONENT = re.compile(r"(?<=[\d.])[eE][-+]?\d+\b")


def read_metrics(log: Path, patterns: Mapping[str, str], measured: Measured) -> dict[str, Series]:
    r"""For each pattern with a match, by name: every number its group matched.

    Of 2.5e-05 a group `([\d.]+)` matches 2.5: the exponent is part of the number all the same.
    `^` and `$` match at the begin and end of each line.  The step of a number follows from
    how many bytes had been printed at each step.  Raises `ValueError` for a match that is
    not a number.
    """
    text = log.read_bytes().decode("utf-8", "surrogateescape")
    sizes = [size for _, size in measured.output_marks]
    found = {}
    for name, pattern in patterns.items():
        series = Series()
        for match in re.finditer(pattern, text, re.MULTILINE):
            series.values.append(_number(match, name, log))
            position = len(text[: match.start()].encode("utf-8", "surrogateescape"))
            series.steps.append(_step(position, sizes, measured))
        if series.values:
            found[name] = series
    return found


def _step(position: int, sizes: list[int], measured: Measured) -> int:
    """How many steps had been taken when byte `position` was printed.

    `output_marks` are made at the end of steps; what is printed after step 5 and
    before step 6 is in the mark of step 6.
    """
    index = bisect.bisect_right(sizes, position)
    if index == len(sizes):
        return len(measured.skipped)
    return measured.output_marks[index][0] - 1


def _number(match: re.Match[str], name: str, log: Path) -> float:
    exponent = _EXPONENT.match(match.string, match.end(1))
    try:
        return float(match[1] + exponent[0] if exponent else match[1])
    except (TypeError, ValueError):
        raise ValueError(
            f"--metric {name}={match.re.pattern}: found {match[1]!r} in {match[0]!r} ({log}), "
            "expected a number."
        ) from None
