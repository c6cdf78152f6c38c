"""Text and tables as LaTeX shows them.  `templates/` has the documents.

All compiles with pdflatex: formulas and figures are in math mode, and a letter that pdflatex
lacks is given by its number.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence

from ampatch.sweep.report.numbers import MISSING
from ampatch.sweep.report.table import Column

_UNITS = {"step ms": "step (ms)", "memory MiB": "memory (MiB)"}
_PLAIN = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "\N{PLUS-MINUS SIGN}": r"$\pm$", "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{EN DASH}": "--", "\N{EM DASH}": "---", "\N{MINUS SIGN}": "$-$",
    "\N{NO-BREAK SPACE}": "~",
    "\N{DAGGER}": r"$^{\dagger}$", "\N{DOUBLE DAGGER}": r"$^{\ddagger}$",
    "\N{HORIZONTAL ELLIPSIS}": r"\dots{}", "\N{MICRO SIGN}": r"$\mu$",
}  # fmt: skip
_LETTERS = "ßæÆœŒøØ"  # of pdflatex, besides ASCII and accents
_QUOTED = re.compile(r'"([^"]*)"')
_OF_TWO_HYPHENS = re.compile("-(?=-)")  # of "--resume"; two would become a dash
_NUMBERS = re.compile(r"[-+]?[\d.]+(e[-+]\d+)?[-+\d.e,/\[\] x±†‡]*")  # a cell of figures alone
_EXPONENT = re.compile(r"(?<=\d)e\+?(-?)0*(\d+)")
_LONGEST = 12  # letters in a line of a cell that is no figure
_POWER = "ncp * s / sqrt(n)"
_FORMULA = re.compile(
    rf"({re.escape(_POWER)}"
    r"|\b\d[\d.]*x(?!\w)"  # 1.62x
    r"|\bp=[\d.]+(?:e-\d+)?"
    r"|(?<![\w.\[-])[-+]?\d[\d.]*(?:e[-+]\d+)? \[[-+\d., e]+\])"  # a difference, its interval
)
_IN_MATH = str.maketrans(
    {"x": r"\times", "±": r"\pm", "†": r"^{\dagger}", "‡": r"^{\ddagger}"}
)  # fmt: skip


def escaped(text: str) -> str:
    """`text` as LaTeX shows it; a letter that pdflatex lacks is given by its number."""
    parts = ("".join(map(_letter, part)) for part in _OF_TWO_HYPHENS.split(text))
    return _QUOTED.sub(r"``\1''", "-{}".join(parts)).replace('"', "''")


def with_formulas(text: str) -> str:
    """Escaped, with formulas in math mode."""
    pieces = _FORMULA.split(text)  # every second one is a formula
    return "".join(_math(one) if n % 2 else escaped(one) for n, one in enumerate(pieces))


def head(column: Column, texts: Sequence[str]) -> str:
    """The title, each word on its own line where it is longer than what stands below."""
    title = _UNITS.get(column.title, column.title).replace(" - ", " -\N{NO-BREAK SPACE}")
    widest = max((len(part) for text in texts for part in _parts(text)), default=0)
    return _stacked(column, map(escaped, [title] if len(title) <= widest else title.split(" ")))


def cell(column: Column, text: str) -> str:
    """The text, in math mode if it is made of figures; an interval stands below its value."""
    if text == MISSING:
        return "--"
    if not column.right or not _NUMBERS.fullmatch(text):
        return _stacked(column, map(escaped, _parts(text)))
    value, *below = map(_math, _parts(text))
    return _stacked(column, [value, *(rf"\scriptsize {part}" for part in below)])


def _parts(text: str) -> list[str]:
    """What stands in the lines of a cell: a page has no room for long ones."""
    if _NUMBERS.fullmatch(text):
        return re.sub(r" (?=[\[±])", "\n", text).split("\n")
    return textwrap.wrap(text, _LONGEST) or [""]


def _stacked(column: Column, lines: Iterable[str]) -> str:
    first, *others = lines
    if not others:
        return first
    side = "r" if column.right else "l"
    whole = r"\\".join([first, *others])
    return rf"\begin{{tabular}}[t]{{@{{}}{side}@{{}}}}{whole}\end{{tabular}}"


def _letter(letter: str) -> str:
    if letter in _PLAIN:
        return _PLAIN[letter]
    if letter in "\n\t" or " " <= letter <= "~":
        return letter
    base = unicodedata.normalize("NFKD", letter)[0]
    if letter in _LETTERS or (base.isascii() and base.isalpha()):  # pdflatex has accented ones
        return letter
    return rf"\texttt{{U+{ord(letter):04X}}}"


def _math(text: str) -> str:
    if text == _POWER:
        return r"$\mathrm{ncp}\cdot s/\sqrt{n}$"
    text = _EXPONENT.sub(r"\\cdot10^{\1\2}", text.translate(_IN_MATH))
    return f"${text}$".replace(" [", "$ $[")  # a line may end between them
