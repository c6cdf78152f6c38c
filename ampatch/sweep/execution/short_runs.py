"""Short runs, which are there for their timing: after how many steps they end, and which are due.

A short run takes the steps that the first whole run of O0 has taken in about `SECONDS`, but at
least `LEAST_STEPS`, of which a quarter is the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.figures import OK, status, step_times
from ampatch.sweep.trial import BASE, Trial

SECONDS = 3.0  # of training
LEAST_STEPS = 24


def short_steps(runs: Iterable[Run]) -> int | None:
    """After how many optimizer steps short runs end; None: no whole run of O0 went well yet."""
    for run in runs:
        if run.case == BASE and not run.trial.short and status(run) == OK:
            times = step_times(run.measured)
            if times is None or not times.median:
                return LEAST_STEPS
            return max(LEAST_STEPS, math.ceil(SECONDS * 1000 / times.median))
    return None


def is_due(trial: Trial, runs: Iterable[Run], fail_fast: bool = False) -> bool:
    """Whether a trial is worth its time: no short run of a row that has failed, nor without O0.

    Nor a whole run of a row that has failed in a short one; with `fail_fast`: in any.
    """
    needed = (trial.case, BASE) if trial.short else (trial.case,)
    failed = [run for run in runs if run.case in needed and status(run) != OK]
    at_once = trial.short or fail_fast
    return not any((at_once or run.trial.short) and not run.trial.again for run in failed)
