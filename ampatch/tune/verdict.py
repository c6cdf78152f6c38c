"""Whether a candidate trains as O0 does.

Each candidate is judged alone, as the sweep judges a row.  The p values are not corrected for the
number of candidates: otherwise a verdict would depend on how many were tried before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampatch.errors import AmpatchError
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.report.comparisons import comparison_text
from ampatch.sweep.report.directions import direction_options
from ampatch.sweep.report.margin import (
    ONE_PERCENT,
    Margin,
    deciding_comparisons,
    first_untested,
    worse_comparisons,
)
from ampatch.sweep.report.recommendation import direction_unknown
from ampatch.sweep.report.results import Row
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.trial import BASE, Case


class TuneError(AmpatchError):
    """`ampatch tune` cannot find an answer.  Measurements are kept."""


def row_of(
    case: Case,
    runs: Sequence[Run],
    judged: str | None,
    better: Mapping[str, str],
    margin: Margin = ONE_PERCENT,
) -> Row:
    """The row of a case, from the runs of this case and of O0."""
    rows = summarize([run for run in runs if run.case in (BASE, case)], judged, better, margin)
    return next(row for row in rows if row.label == case.label)


def passes(row: Row) -> bool:
    """Whether no deciding comparison of the row has the outcome "worse" (see `Comparison`).

    Raises `TuneError` if nothing can be tested, or if the judged quantity differs and has no
    direction.
    """
    if row.outcome == "failed":
        return False
    if row.start:
        raise TuneError(
            f"{row.name}: it has a {row.start}, so it cannot be compared with O0. Expected the "
            "same data and first weights in each run: have the seed reach the script, or give "
            "--override-seeds."
        )
    if not deciding_comparisons(row):
        raise TuneError(f"{row.name}: there is no loss and no metric to compare with O0's.")
    unknown = direction_unknown(row)
    if unknown:
        raise TuneError(f"{row.name}: {unknown}: {direction_options(row.comparisons[0].name)}.")
    untested = first_untested(row)
    if untested is not None:
        raise TuneError(
            f"{untested.name} cannot be tested: {untested.untested}. A test needs scipy, "
            "--seeds 2 or more, and runs that differ (have {seed} among the script's arguments, or "
            "give --override-seeds)."
        )
    return not worse_comparisons(row)


def failure_reason(row: Row) -> str:
    """Why a row does not pass."""
    if row.outcome == "failed":
        return row.status
    return "; ".join(comparison_text(quantity) for quantity in worse_comparisons(row))
