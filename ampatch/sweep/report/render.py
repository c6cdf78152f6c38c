"""Writes the page, the pictures and the tables of a sweep, from the files in its directory.

    DIR/report.html              the page: table, pictures and verdicts
    DIR/plots/NAME.svg .pdf .png the pictures: loss-by-step, loss-by-time, speed

They are written when a sweep has ended, and by `ampatch report` from the stored results.  The page
(`templates/page.html.j2`) has no script and needs no other file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampatch.sweep.json_files import write_whole
from ampatch.sweep.report.numbers import setting_text, split_interval
from ampatch.sweep.report.pictures import LOOKS, Picture, pictures
from ampatch.sweep.report.provenance import facts, script_command
from ampatch.sweep.report.recommendation import anything_compared
from ampatch.sweep.report.result_files import render_template, write_tables
from ampatch.sweep.report.results import PICTURE_FILES, PLOTS, REPORT, Results, read_sweep
from ampatch.sweep.report.table import notes, table


def write_report(directory: str | Path) -> None:
    """Write the report, its pictures, and the table as CSV, Markdown and LaTeX again.

    Raises `FileNotFoundError` if there are no results, `ValueError` for results in another
    version's format, `OSError` if nothing can be written.
    """
    sweep = read_sweep(directory)
    path, results = sweep.directory, sweep.results
    drawn = pictures(results, sweep.runs)
    (path / PLOTS).mkdir(exist_ok=True)
    for name in PICTURE_FILES:
        (path / name).unlink(missing_ok=True)
    for picture in drawn:
        for form, content in picture.files.items():
            (path / PLOTS / f"{picture.name}.{form}").write_bytes(content)
    write_tables(path, results)
    write_whole(path / REPORT, as_html(results, drawn))


def as_html(results: Results, drawn: Sequence[Picture]) -> str:
    """The report as one HTML page."""
    rows = results.rows
    return render_template(
        "page.html", title=f"{Path(results.script).name} at several opt levels",
        called=script_command(results), results=results, is_compared=anything_compared(rows),
        figures=table(rows), explained=notes(rows), drawn=drawn, looks=LOOKS, facts=facts(results),
        settings={n: setting_text(v) for n, v in {**results.options, **results.settings}.items()},
        split_interval=split_interval,
    )  # fmt: skip
