"""A sweep as LaTeX: the table with booktabs, and the pictures with their captions.

    \\usepackage{booktabs,graphicx}
    \\input{summary.tex}  \\input{figures.tex}  \\input{method.tex}

`method.tex` is a paragraph for an appendix: what was measured and how it was tested.  All compile
with pdflatex.  The table has the width of the page, also in two columns.
Comments at the top of each say where the figures come from.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from ampatch.sweep.report.figures import OK, brief
from ampatch.sweep.report.judge import method
from ampatch.sweep.report.numbers import MISSING, counted, split_interval
from ampatch.sweep.report.plots import Picture
from ampatch.sweep.report.provenance import lines, software
from ampatch.sweep.report.results import PLOTS, Results, Row
from ampatch.sweep.report.table import Column, columns, mark_notes, notes

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
_IN_NUMBERS = {
    "x": r"\times", "±": r"\pm", "†": r"^{\dagger}", "‡": r"^{\ddagger}",
}  # fmt: skip
_FORMULAS = (
    (re.compile(r"ncp \* s / sqrt\(n\)"), r"$\\mathrm{ncp}\\cdot s/\\sqrt{n}$"),
    (re.compile(r"\b(\d[\d.]*)x(?!\w)"), r"$\1\\times$"),
    (re.compile(r"\bp=([\d.]+(?:e-\d+)?)"), r"$p=\1$"),
    (re.compile(r"(?<![\w.\[-])([-+]\d[\d.]*) \[([-+\d., e]+)\]"), r"$\1$ $[\2]$"),
)
_STACKED = (
    r"\providecommand{\ampatchcell}[2]"
    r"{\begin{tabular}[t]{@{}r@{}}#1\\{\scriptsize #2}\end{tabular}}"
)


def as_table(results: Results) -> str:
    """The table and what its marks mean, as a `table*` environment: of the width of the page."""
    rows = results.rows
    shown = [column for column in columns(rows) if column.main]
    sides = "".join("r" if column.right else "l" for column in shown)
    return "\n".join(
        [
            *comments(results),
            _STACKED,
            r"\begin{table*}[tbp]",
            r"  \centering",
            rf"  \caption{{{escaped(caption(results))}}}",
            r"  \label{tab:ampatch-sweep}",
            r"  \footnotesize\setlength{\tabcolsep}{4pt}%",
            rf"  \begin{{tabular}}{{@{{}}{sides}@{{}}}}",
            r"    \toprule",
            f"    {' & '.join(_head(column, rows) for column in shown)} \\\\",
            r"    \midrule",
            *(f"    {' & '.join(_cell(column, row) for column in shown)} \\\\" for row in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"  \par\smallskip",
            rf"  \parbox{{\linewidth}}{{\footnotesize {_text(' '.join(_footnote(results)))}}}",
            r"\end{table*}",
            "",
        ]
    )


def as_method(results: Results) -> str:
    """A paragraph that says what the columns are, how rows were compared, and what came of it."""
    said = [f"{row.name}: {row.verdict}." for row in results.rows]
    rows = results.rows
    text = [*_skips(rows), *notes(rows, main=True), method("O0"), *said, *results.notes]
    return (
        "\n".join(
            [
                *comments(results),
                r"\paragraph{How the opt levels were compared.}",
                _text(" ".join(text)),
            ]
        )
        + "\n"
    )


def as_figures(results: Results, pictures: Sequence[Picture]) -> str:
    """A `figure` environment for each picture; the files are found from the sweep's folder."""
    blocks = comments(results)
    blocks += [
        r"\providecommand{\ampatchplots}{"
        + PLOTS
        + "}  % \\newcommand it before for another folder"
    ]
    for picture in pictures:
        blocks += [
            r"\begin{figure}[tbp]",
            r"  \centering",
            rf"  \includegraphics[width=\ifdim\linewidth>4.6in 4.6in\else\linewidth\fi]"
            rf"{{\ampatchplots/{picture.name}.pdf}}",
            rf"  \caption{{{escaped(picture.caption)}}}",
            rf"  \label{{fig:ampatch-{picture.name}}}",
            r"\end{figure}",
        ]
    return "\n".join([*blocks, ""])


def comments(results: Results) -> list[str]:
    """Where the figures come from, as comments."""
    needed = r"needs \usepackage{booktabs,graphicx}"
    return [f"% {line}" for line in (*lines(results), needed)]


def caption(results: Results) -> str:
    """What was trained, how often, and with what."""
    seeds = max((row.seeds for row in results.rows), default=0)
    device = results.provenance.get("device", "")
    on = f" on {device}" if device and device != "cpu" else ""
    return (
        f"{Path(results.script).name} at several opt levels, {counted(seeds, 'seed')} per row{on} "
        f"({software(results)})."
    )


def escaped(text: str) -> str:
    """`text` as LaTeX shows it; a letter that pdflatex lacks is given by its number."""
    parts = ("".join(map(_letter, part)) for part in _OF_TWO_HYPHENS.split(text))
    return _QUOTED.sub(r"``\1''", "-{}".join(parts)).replace('"', "''")


def _letter(letter: str) -> str:
    if letter in _PLAIN:
        return _PLAIN[letter]
    if letter in "\n\t" or " " <= letter <= "~":
        return letter
    base = unicodedata.normalize("NFKD", letter)[0]
    if letter in _LETTERS or (base.isascii() and base.isalpha()):  # pdflatex has accented ones
        return letter
    return rf"\texttt{{U+{ord(letter):04X}}}"


def _footnote(results: Results) -> list[str]:
    """What a reader of the table alone has to know, in about two lines."""
    failed = [f"{row.name}: {brief(row.status)}." for row in results.rows if row.status != OK]
    return [*failed, "In brackets are quartiles.", *mark_notes(results.rows)]


def _skips(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.name}: {row.skipped} of {row.all_steps} steps were skipped after an overflow."
        for row in rows
        if row.skipped
    ]


def _text(text: str) -> str:
    """Escaped, with formulas in math mode."""
    pieces, held = text, []
    for pattern, form in _FORMULAS:

        def hold(found: re.Match[str], form: str = form) -> str:
            held.append(found.expand(form))
            return f"\0{len(held) - 1}\0"

        pieces = pattern.sub(hold, pieces)
    parts = pieces.split("\0")
    return "".join(held[int(part)] if i % 2 else escaped(part) for i, part in enumerate(parts))


def _head(column: Column, rows: Sequence[Row]) -> str:
    """The title, each word on its own line where it is longer than what stands below."""
    title = _UNITS.get(column.title, column.title).replace(" - ", " -\N{NO-BREAK SPACE}")
    parts = (part for row in rows for part in split_interval(column.text(row)))
    if len(title) <= max(map(len, parts), default=0) or " " not in title:
        return escaped(title)
    side = "r" if column.right else "l"
    broken = r"\\".join(map(escaped, title.split(" ")))
    return rf"\shortstack[{side}]{{\strut {broken}}}"


def _cell(column: Column, row: Row) -> str:
    """The text; an interval stands below its value."""
    text = column.text(row)
    if text == MISSING:
        return "--"
    if not column.right:
        return escaped(text)
    value, interval = map(_number, split_interval(text))
    return rf"\ampatchcell{{{value}}}{{{interval}}}" if interval else value


def _number(text: str) -> str:
    """A cell: in math mode if it is made of figures."""
    if not _NUMBERS.fullmatch(text.removeprefix("[")):
        return escaped(text)
    return f"${''.join(_IN_NUMBERS.get(letter, letter) for letter in text)}$"
