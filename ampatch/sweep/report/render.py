"""The pictures, pages and tables of a sweep, from what lies in its directory.

    DIR/report.html              all of it on one page, the pictures inside
    DIR/plots/NAME.svg .pdf .png loss-by-step, loss-by-time, speed, memory, loss-scale
    DIR/plots/captions.md        what each shows, in which units, what a band is

They are made when a sweep has ended, and by `ampatch report` from the stored results.
"""

from __future__ import annotations

from pathlib import Path

from ampatch.sweep.json_files import write_whole
from ampatch.sweep.report.documents import filled
from ampatch.sweep.report.drawing import FORMATS
from ampatch.sweep.report.page import as_html
from ampatch.sweep.report.plots import MISSING, Gallery, available, gallery
from ampatch.sweep.report.provenance import lines
from ampatch.sweep.report.results import CAPTIONS, PLOTS, REPORT, Results, read_sweep
from ampatch.sweep.report.summary_files import write_tables


def write_report(directory: str | Path) -> str:
    """Write report and pictures, and the table as CSV, Markdown and LaTeX again.

    Returns a sentence that says what the report lacks and why, or "" if it is complete.
    Raises `FileNotFoundError` if there are no results, `ValueError` for results in another
    version's format, `OSError` if nothing can be written.
    """
    sweep = read_sweep(directory)
    path, results, runs = sweep.directory, sweep.results, sweep.runs
    lacking = "" if available() else MISSING
    drawn = Gallery() if lacking else gallery(results, runs)
    _write_pictures(path, results, drawn)
    write_tables(path, results)
    write_whole(path / REPORT, as_html(results, runs, drawn, lacking))
    return lacking


def _write_pictures(path: Path, results: Results, drawn: Gallery) -> None:
    """Write the pictures and their captions; those of an earlier report go."""
    (path / PLOTS).mkdir(exist_ok=True)
    for form in FORMATS:
        for old in (path / PLOTS).glob(f"*.{form}"):
            old.unlink()
    for picture in drawn.pictures:
        for form, data in picture.files.items():
            (path / PLOTS / f"{picture.name}.{form}").write_bytes(data)
    captions = filled("captions.md", drawn=drawn, origin=lines(results))
    write_whole(path / PLOTS / CAPTIONS, captions)
