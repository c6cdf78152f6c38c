"""A sweep as one HTML page without scripts, and without other files or network."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.figures import status, step_ms
from ampatch.sweep.report.judge import anything_compared, mean_and_sd, method
from ampatch.sweep.report.plots import Picture
from ampatch.sweep.report.results import Comparison, Results, Row
from ampatch.sweep.report.table import MISSING, PARTS_NOTE, columns, notes, part_columns

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --page: #fff; --quiet: #5a5a60;
  --line: #d5d5da; --box: #f3f3f5; --good: #00693e; --bad: #a63300; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8ea; --page: #17171a;
  --quiet: #a8a8b0; --line: #3a3a40; --box: #222226; --good: #4fd09a; --bad: #ff9a66; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--text);
  background: var(--page); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
.quiet, figcaption, dt { color: var(--quiet); }
.box { background: var(--box); border-left: 4px solid var(--good); padding: .75rem 1rem; }
.open { border-left-color: var(--quiet); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 4px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .9rem; }
th, td { padding: .4rem .6rem; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { background: var(--box); }
.right { text-align: right; }
td:first-child { white-space: normal; min-width: 6rem; max-width: 12rem; }
td:last-child { white-space: normal; min-width: 9.5rem; }
ul { padding-left: 1.1rem; }
.failed, .worse { color: var(--bad); }
.better { color: var(--good); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; background: #fff; border-radius: 4px;
  border: 1px solid var(--line); padding: .25rem; }
dl { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .25rem 1rem; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .5rem 0; }
"""
_NOTHING_ELSE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def as_html(
    results: Results, runs: Sequence[Run], pictures: Sequence[Picture], lacking: str = ""
) -> str:
    """The page; `lacking` says why there are no pictures, if there are none."""
    title = f"{Path(results.script).name} at several opt levels"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet"><code>{escape(shlex.join([results.script, *results.arguments]))}</code>'
        f"<br>{results.done} of {results.planned} runs, begun {escape(results.started)}.</p>",
        f'<p class="{_box(results)}"><strong>Recommendation.</strong> '
        f"{escape(results.recommendation)}</p>",
        *(f"<p><strong>Note.</strong> {escape(note)}</p>" for note in results.notes),
        "<h2>Verdicts</h2>",
        _verdicts(results.rows),
        "<h2>Figures</h2>",
        _figures(results.rows),
        _parts(results.rows),
        "<h2>Pictures</h2>",
        f'<div class="pictures">{"".join(map(_picture, pictures))}</div>',
        f"<p>{escape(lacking)}</p>" if lacking else "",
        "<h2>Accuracy beside O0</h2>",
        _comparisons(results.rows),
        "<h2>Settings, versions, machine</h2>",
        _facts(results, runs),
        f"<details><summary>All {len(runs)} runs</summary>{_runs(runs)}</details>",
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


def _box(results: Results) -> str:
    """The class of the recommendation: green only where something was compared."""
    return "box" if anything_compared(results.rows) else "box open"


def _verdicts(rows: Sequence[Row]) -> str:
    items = (
        f'<li class="{escape(row.outcome)}"><strong>{escape(row.name)}</strong>: '
        f"{escape(row.verdict)}</li>"
        for row in rows
    )
    return f"<ul>{''.join(items)}</ul>" if rows else "<p>No run has ended yet.</p>"


def _figures(rows: Sequence[Row]) -> str:
    shown = columns(rows)
    return (
        _table(
            "Figures per row",
            [(column.title, column.right) for column in shown],
            ([column.text(row) for column in shown] for row in rows),
        )
        + f'<p class="quiet">{escape(" ".join(notes(rows)))}</p>'
    )


def _parts(rows: Sequence[Row]) -> str:
    shown = part_columns(rows)
    if not shown:
        return ""
    heads = [(column.title, column.right) for column in shown]
    cells = ([column.text(row) for column in shown] for row in rows)
    table = _table("Parts of a step", heads, cells)
    return f'<h2>Parts of a step</h2>{table}<p class="quiet">{escape(PARTS_NOTE)}</p>'


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
        MISSING if one.p is None else f"{one.p:.2g}",
        MISSING if one.corrected_p is None else f"{one.corrected_p:.2g}",
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


def _facts(results: Results, runs: Sequence[Run]) -> str:
    devices = dict.fromkeys(run.measured.device for run in runs if run.measured)
    facts = {
        **results.settings,
        **results.versions,
        **results.machine,
        "ran on": ", ".join(filter(None, devices)) or "unknown",
    }
    items = (
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd><code>{escape(_plain(value))}</code></dd>"
        for name, value in facts.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<figure><figcaption>{escape(picture.title)}</figcaption><img alt="{escape(picture.alt)}" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


def _table(caption: str, heads: Sequence[tuple[str, bool]], lines: Iterable[Sequence[str]]) -> str:
    """A table that scrolls if it is too wide; `heads` are titles and "aligned to the right"."""
    sides = [' class="right"' if right else "" for _, right in heads]
    top = "".join(
        f'<th scope="col"{side}>{escape(text)}</th>' for side, (text, _) in zip(sides, heads)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{escape(cell)}</td>" for side, cell in zip(sides, cells))
        + "</tr>"
        for cells in lines
    )  # fmt: skip
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
