"""A sweep as one HTML page without scripts, and without other files or network.

What stands where, and how it looks: `templates/page.html.j2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.documents import filled
from ampatch.sweep.report.figures import OK, status, step_ms
from ampatch.sweep.report.judge import METHOD, mean_and_sd, outcome_text, p_text
from ampatch.sweep.report.numbers import MISSING, number, setting_text, split_interval
from ampatch.sweep.report.plots import Gallery
from ampatch.sweep.report.provenance import called, facts
from ampatch.sweep.report.recommendation import anything_compared
from ampatch.sweep.report.results import Comparison, Results
from ampatch.sweep.report.table import (
    PARTS_NOTE,
    Column,
    Table,
    by_row,
    columns,
    notes,
    part_columns,
)


def as_html(results: Results, runs: Sequence[Run], drawn: Gallery, lacking: str = "") -> str:
    """The page; `lacking` says why there are no pictures, if there are none."""
    rows = results.rows
    parts = part_columns(rows)
    compared = [(row, one) for row in rows for one in row.comparisons]
    return filled(
        "page.html",
        title=f"{Path(results.script).name} at several opt levels",
        called=called(results),
        results=results,
        is_compared=anything_compared(rows),
        figures=Table.of(by_row(columns(rows)), rows),
        failed=[row for row in rows if row.status != OK],
        explained=" ".join(notes(rows)),
        comparisons=Table.of(_COMPARISON, compared),
        method=METHOD,
        parts=Table.of(by_row(parts), rows) if parts else None,
        parts_explained=PARTS_NOTE,
        drawn=drawn,
        lacking=lacking,
        facts=facts(results),
        settings={name: setting_text(value) for name, value in results.settings.items()},
        runs=Table.of(_RUN, runs),
        split_interval=split_interval,
    )


def _interval(one: Comparison) -> str:
    return MISSING if one.low is None else f"{one.low:+.2g} to {one.high:+.2g}"


_COMPARISON = [  # of a row and one of its comparisons
    Column("row", lambda pair: pair[0].name, right=False),
    Column("quantity", lambda pair: pair[1].name, right=False),
    Column("mean ± sd", lambda pair: mean_and_sd(pair[1].mean, pair[1].sd, pair[1].n)),
    Column("O0", lambda pair: mean_and_sd(pair[1].base_mean, pair[1].base_sd, pair[1].n)),
    Column("seeds", lambda pair: str(pair[1].n)),
    Column("difference", lambda pair: f"{pair[1].difference:+.3g}"),
    Column("95 % interval", lambda pair: _interval(pair[1])),
    Column("p", lambda pair: p_text(pair[1], pair[1].p)),
    Column("p, Holm", lambda pair: p_text(pair[1], pair[1].corrected_p)),
    Column("would be seen", lambda pair: number(pair[1].smallest, "{:.2g}")),
    Column("outcome", lambda pair: outcome_text(pair[1]), right=False),
]
_RUN = [
    Column("run", lambda run: run.trial.label, right=False),
    Column("status", status, right=False),
    Column("steps", lambda run: str(len(run.measured.skipped)) if run.measured else MISSING),
    Column("step ms", lambda run: number(step_ms(run.measured), "{:.2f}")),
    Column("seconds", lambda run: f"{run.seconds:.1f}"),
    Column("log", lambda run: f"runs/{run.trial.file_stem}.log", right=False),
]
