"""The pictures and the HTML report of a sweep, from what lies in its directory.

    DIR/report.html        all of it on one page, the pictures inside
    DIR/plots/NAME.png     loss-by-step, loss-by-time, speed, memory, loss-scale

They are made when a sweep has ended, and by `ampatch report` from the stored results.
"""

from __future__ import annotations

from pathlib import Path

from ampatch.sweep.json_files import write_whole
from ampatch.sweep.report.page import as_html
from ampatch.sweep.report.plots import MISSING, available, pictures
from ampatch.sweep.report.results import PLOTS, REPORT, read_results, read_runs
from ampatch.sweep.report.summary_files import as_csv, as_markdown


def write_report(directory: str | Path) -> str:
    """Write report and pictures, and the table as CSV and Markdown again.

    Returns a sentence that says what the report lacks and why, or "" if it is complete.
    Raises `FileNotFoundError` if there are no results, `ValueError` for results in another
    version's format, `OSError` if nothing can be written.
    """
    path = Path(directory)
    results = read_results(path)
    if results is None:
        raise FileNotFoundError(f"{path}: there are no results of a sweep in this directory.")
    runs = list(read_runs(path))
    lacking = "" if available() else MISSING
    drawn = [] if lacking else pictures(results, runs)
    (path / PLOTS).mkdir(exist_ok=True)
    for old in (path / PLOTS).glob("*.png"):
        old.unlink()
    for picture in drawn:
        (path / PLOTS / f"{picture.name}.png").write_bytes(picture.png)
    write_whole(path / "summary.csv", as_csv(results.rows))
    write_whole(path / "summary.md", as_markdown(results))
    write_whole(path / REPORT, as_html(results, runs, drawn, lacking))
    return lacking
