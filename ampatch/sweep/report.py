"""The pictures and the HTML report of a sweep, from what lies in its directory.

    DIR/report.html        all of it on one page, the pictures inside
    DIR/plots/NAME.png     loss-by-step, loss-by-time, speed, memory, loss-scale

They are made when a sweep has ended, and again whenever asked for: no run is needed.
"""

from __future__ import annotations

from pathlib import Path

from ampatch.sweep.files import as_csv, as_markdown
from ampatch.sweep.page import as_html
from ampatch.sweep.plots import MISSING, available, pictures
from ampatch.sweep.record import write_whole
from ampatch.sweep.results import PLOTS, REPORT, read_results, read_runs


def write_report(directory: str | Path) -> str:
    """Write report and pictures, and the table as CSV and Markdown once more.

    Returns what a reader will miss and why: a sentence, or "" where nothing is missing.
    Raises `FileNotFoundError` where there are no results, `ValueError` for those of another
    version's format, `OSError` where nothing can be written.
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
