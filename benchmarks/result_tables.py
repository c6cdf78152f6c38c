"""Reads committed results: the tables of a Markdown file, and what it says of itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("results")
NUMBER = r"([+-]?[\d.]+)"
INTERVAL = re.compile(rf"{NUMBER} \({NUMBER} to {NUMBER}\)")
WHERE = r"^(\d{4}-\d\d-\d\d, \w+, Python \S+, torch \S+?)[.,]?$"  # of measuring.machine


class Value(NamedTuple):
    """A number of a cell, with the ends of its interval where it has one."""

    middle: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, cell: str) -> Value:
        """`1.09 (1.08 to 1.10)`, or a number alone."""
        match = INTERVAL.fullmatch(cell)
        return cls(*map(float, match.groups())) if match else cls(float(cell))

    def __str__(self) -> str:
        ends = "" if self.low is None else f" ({self.low:g} to {self.high:g})"
        return f"{self.middle:g}{ends}"


class Results:
    """A file of results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")

    @classmethod
    def newest(cls, name: str) -> Results:
        """The last of the dated files `results/DATE-name.md`."""
        files = sorted(RESULTS.glob(f"????-??-??-{name}.md"))
        if not files:
            raise FileNotFoundError(f"no file {RESULTS}/DATE-{name}.md: a benchmark writes it")
        return cls(files[-1])

    def says(self, pattern: str) -> str:
        """The first group of a pattern in the text."""
        match = re.search(pattern, self.text, re.MULTILINE)
        if match is None:
            raise ValueError(f"{self.path} has nothing like {pattern!r}")
        return match[1]

    def tables(self) -> dict[str, list[dict[str, str]]]:
        """The rows of each table by the heading above it; a row is its cells by column."""
        tables: dict[str, list[dict[str, str]]] = {}
        heading, columns = "", list[str]()
        for line in self.text.splitlines():
            if line.startswith("#"):
                heading = line.lstrip("# ")
            if not line.startswith("|"):
                columns = []
            elif not columns:
                columns = _cells(line)
            elif not line.startswith("|---"):
                tables.setdefault(heading, []).append(dict(zip(columns, _cells(line))))
        return tables


def _cells(line: str) -> list[str]:
    """The cells of a table's line, without stars."""
    return [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]
