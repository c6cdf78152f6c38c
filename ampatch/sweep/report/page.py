"""A sweep as one HTML page without scripts, and without other files or network."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.figures import OK, status, step_ms
from ampatch.sweep.report.judge import mean_and_sd, method, p_text
from ampatch.sweep.report.numbers import MISSING, split_interval
from ampatch.sweep.report.plots import Gallery, Picture
from ampatch.sweep.report.provenance import called, facts
from ampatch.sweep.report.recommendation import anything_compared
from ampatch.sweep.report.results import Comparison, Results, Row
from ampatch.sweep.report.table import PARTS_NOTE, Column, columns, notes, part_columns

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --page: #fff; --quiet: #5a5a60;
  --line: #d5d5da; --box: #f3f3f5; --good: #00693e; --bad: #a63300; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8ea; --page: #17171a;
  --quiet: #a8a8b0; --line: #3a3a40; --box: #222226; --good: #4fd09a; --bad: #ff9a66;
  --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--text);
  background: var(--page); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
.quiet, figcaption, dt { color: var(--quiet); }
.box { background: var(--box); border-left: 4px solid var(--accent); padding: .75rem 1rem; }
.open { border-left-color: var(--quiet); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 4px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .5rem; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { background: var(--box); }
.right { text-align: right; }
td small { color: var(--quiet); }
td { vertical-align: top; line-height: 1.3; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--page); }
thead th:first-child { background: var(--box); }
td:first-child { white-space: normal; min-width: 5rem; max-width: 12rem; }
td:last-child { white-space: normal; min-width: 4rem; }
ul { padding-left: 1.1rem; }
.failed, .worse { color: var(--bad); }
.better { color: var(--good); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; }
figure { margin: 0; }
figcaption { font-size: .85rem; padding: .4rem 0 0; }
figure img { display: block; width: 100%; height: auto; background: #fff; border-radius: 4px;
  border: 1px solid var(--line); padding: .25rem; }
dl { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .25rem 1rem; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .6rem 0; font-weight: 600; }
@page { margin: 1.5cm; }
@media print {
  :root { color-scheme: light; --text: #000; --page: #fff; --quiet: #444; --line: #bbb;
    --box: #f3f3f5; --good: #00693e; --bad: #a63300; --accent: #0072b2; }
  html { font-size: 9pt; }
  body { max-width: none; padding: 0; }
  .scroll { overflow: visible; border: 0; }
  table { font-size: 7pt; }
  th, td { padding: 2pt 3pt; }
  td:first-child, th:first-child { position: static; }
  details::details-content { content-visibility: visible; }
  figure, tr, .box { break-inside: avoid; }
  h2, summary { break-after: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; }
}
"""
_NOTHING_ELSE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def as_html(results: Results, runs: Sequence[Run], drawn: Gallery, lacking: str = "") -> str:
    """The page; `lacking` says why there are no pictures, if there are none."""
    title = f"{Path(results.script).name} at several opt levels"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet"><code>{escape(called(results))}</code>'
        f"<br>{results.done} of {results.planned} runs, begun {escape(results.started)}.</p>",
        f'<p class="{_box(results)}"><strong>Recommendation.</strong> '
        f"{escape(results.recommendation)}</p>",
        *(f"<p><strong>Note.</strong> {escape(note)}</p>" for note in results.notes),
        "<h2>Table</h2>",
        _figures(results.rows),
        _folded(f"Verdicts, row by row ({len(results.rows)})", _verdicts(results.rows)),
        _folded("Accuracy beside O0", _comparisons(results.rows)),
        _parts(results.rows),
        "<h2>Pictures</h2>" if drawn.pictures or drawn.left_out or lacking else "",
        f'<div class="pictures">{"".join(map(_picture, drawn.pictures))}</div>',
        *(f'<p class="quiet">{escape(said)}</p>' for said in drawn.left_out),
        f"<p>{escape(lacking)}</p>" if lacking else "",
        "<h2>Where the figures come from</h2>",
        _facts(facts(results)),
        _folded("Settings", _facts(results.settings)),
        _folded(f"All runs ({len(runs)})", _runs(runs)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_ELSE}">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n</body>\n</html>\n"
    )


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _box(results: Results) -> str:
    """The class of the recommendation: in colour only where something was compared."""
    return "box" if anything_compared(results.rows) else "box open"


def _verdicts(rows: Sequence[Row]) -> str:
    items = (
        f'<li class="{escape(row.outcome)}"><strong>{escape(row.name)}</strong>: '
        f"{escape(row.verdict)}</li>"
        for row in rows
    )
    return f"<ul>{''.join(items)}</ul>" if rows else "<p>No run has ended yet.</p>"


def _figures(rows: Sequence[Row]) -> str:
    """The table, what its columns are, and what is wrong with the rows that failed."""
    failed = "".join(
        f'<li class="failed"><strong>{escape(row.name)}</strong>: {escape(row.status)}</li>'
        for row in rows
        if row.status != OK
    )
    return (
        _by_row("Figures per row", rows, columns(rows))
        + (f"<ul>{failed}</ul>" if failed else "")
        + f'<p class="quiet">{escape(" ".join(notes(rows)))}</p>'
    )


def _parts(rows: Sequence[Row]) -> str:
    shown = part_columns(rows)
    if not shown:
        return ""
    table = _by_row("Parts of a step", rows, shown)
    return _folded("Parts of a step", f'{table}<p class="quiet">{escape(PARTS_NOTE)}</p>')


def _by_row(caption: str, rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """A table whose first column names the row, and stays in sight when the others scroll."""
    others = list(itertools.dropwhile(lambda column: not column.right, shown))
    heads = [("row", False), *((column.title, column.right) for column in others)]
    cells = ([row.name, *(_short(column, row) for column in others)] for row in rows)
    return _table(caption, heads, cells)


def _short(column: Column, row: Row) -> str:
    """The text of a cell; of a status the reason without its details."""
    text = column.text(row)
    return re.split(":| at ", text)[0] if column.title == "status" else text


def _comparisons(rows: Sequence[Row]) -> str:
    compared = [(row, one) for row in rows for one in row.comparisons]
    if not compared:
        return "<p>Nothing to compare: no row beside O0 has ended well.</p>"
    heads = ("row", "quantity", "mean ± sd", "O0", "seeds", "difference", "95 % interval", "p")
    heads += ("p, Holm", "would be seen", "")
    return (
        _table(
            "Each quantity of each row beside O0's",
            [(head, 2 <= index < 10) for index, head in enumerate(heads)],
            ([row.name, *_comparison(one)] for row, one in compared),
        )
        + f'<p class="quiet">{escape(method("O0"))}</p>'
    )


def _comparison(one: Comparison) -> list[str]:
    return [
        one.name,
        mean_and_sd(one.mean, one.sd, one.n),
        mean_and_sd(one.base_mean, one.base_sd, one.n),
        str(one.n),
        f"{one.difference:+.3g}",
        MISSING if one.low is None else f"{one.low:+.2g} to {one.high:+.2g}",
        p_text(one, one.p),
        p_text(one, one.corrected_p),
        MISSING if one.smallest is None else f"{one.smallest:.2g}",
        "within seed noise" if one.outcome == "within" else one.outcome,
    ]


def _runs(runs: Iterable[Run]) -> str:
    heads = ("run", "status", "steps", "step ms", "seconds", "log")
    cells = (
        [
            run.trial.label,
            status(run),
            str(len(run.measured.skipped)) if run.measured else MISSING,
            MISSING if step_ms(run.measured) is None else f"{step_ms(run.measured):.2f}",
            f"{run.seconds:.1f}",
            f"runs/{run.trial.file_stem}.log",
        ]
        for run in runs
    )
    return _table("All runs", [(head, head in heads[2:5]) for head in heads], cells)


def _facts(named: Mapping[str, object]) -> str:
    items = (
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd><code>{escape(_plain(value))}</code></dd>"
        for name, value in named.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.files["svg"]).decode()
    return (
        f'<figure><img alt="{escape(picture.alt)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _table(caption: str, heads: Sequence[tuple[str, bool]], lines: Iterable[Sequence[str]]) -> str:
    """A table that scrolls if it is too wide; `heads` are titles and "aligned to the right"."""
    sides = [' class="right"' if right else "" for _, right in heads]
    top = "".join(
        f'<th scope="col"{side}>{escape(text)}</th>' for side, (text, _) in zip(sides, heads)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{_cell(cell)}</td>" for side, cell in zip(sides, cells))
        + "</tr>"
        for cells in lines
    )  # fmt: skip
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    """The text; an interval stands below its value, small."""
    value, interval = map(escape, split_interval(text))
    return f"{value}<br><small>{interval}</small>" if interval else value


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
