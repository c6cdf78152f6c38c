"""Does a candidate train as O0 does?  Judged as the sweep judges a row, each by itself.

The p values are not corrected over the candidates: each is one question, and with Holm's method
the answer would depend on how many were asked before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampatch.errors import AmpatchError
from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.judge import LOSS, never_varies, quality_text
from ampatch.sweep.report.recommendation import ONE_PERCENT, Margin
from ampatch.sweep.report.results import Comparison, Row
from ampatch.sweep.report.summary import summarize
from ampatch.sweep.trial import BASE, Case


class TuneError(AmpatchError):
    """The question of `ampatch tune` cannot be answered; what was measured is kept."""


def row_of(case: Case, runs: Sequence[Run], judged: str | None, better: Mapping[str, str]) -> Row:
    """The row of a case beside O0 alone."""
    rows = summarize([run for run in runs if run.case in (BASE, case)], judged, better)
    return next(row for row in rows if row.label == case.label)


def passes(row: Row, margin: Margin) -> bool:
    """Whether no test shows a difference from O0 that matters.

    Raises `TuneError` where nothing can be tested.
    """
    if row.outcome == "failed":
        return False
    if row.start:
        raise TuneError(
            f"{row.name}: it has a {row.start}, so it cannot be compared with O0. Expected the "
            "same data and first weights in each run: have the seed reach the script, or give "
            "--override-seeds."
        )
    weighed = _weighed(row)
    if not weighed:
        raise TuneError(f"{row.name}: there is no loss and no metric to compare with O0's.")
    return all(_is_fine(one, margin if n == 0 else ONE_PERCENT) for n, one in enumerate(weighed))


def reason(row: Row) -> str:
    """Why a row does not pass."""
    if row.outcome == "failed":
        return row.status
    return "; ".join(quality_text(one, "O0") for one in _weighed(row) if one.outcome == "worse")


def silent(row: Row) -> str:
    """That the judged quantity is one number in all runs, as the end of a sentence; else ""."""
    one = next(iter(row.comparisons), None)
    if one is None or one.p is None or one.difference or not never_varies(one):
        return ""
    return (
        f"{one.name} is {one.mean:.4g} in every run, at O0 too, so it shows no difference. "
        "--judge names another quantity."
    )


def _weighed(row: Row) -> list[Comparison]:
    """The judged quantity, and the last loss."""
    return [one for n, one in enumerate(row.comparisons) if n == 0 or one.name == LOSS]


def _is_fine(one: Comparison, margin: Margin) -> bool:
    if one.outcome == "untested":
        raise TuneError(
            f"{one.name} cannot be tested: {one.untested}. Expected at least --seeds 2, whose runs "
            "differ (have {seed} among the script's arguments, or give --override-seeds), and "
            "scipy."
        )
    return one.outcome != "worse" or _is_small(one, margin.beside(one))


def _is_small(one: Comparison, matters: float) -> bool:
    """Whether the interval shows that the difference is smaller than what matters."""
    if one.low is None or one.high is None:
        return False
    return one.high <= matters if one.better == "lower" else one.low >= -matters
