"""Do all rows start from the same weights?  Their first losses with the same seed show it.

Before the first optimizer step only rounding in half separates a row from O0.  If the first loss
differs by more, the row began with other weights: most often from a file that an earlier trial
wrote, such as `w.pt`, and the script loads if it exists.  Then the rows say nothing about opt
levels, and none is recommended.

Allowed are 32 units of roundoff (docs/explanation/sweep_figures.md has what was measured), and
2**-10 in FP32, because kernels sum in different orders.  They are relative to the larger of the two
losses, or to O0's median loss if that is larger.  A row in half may also differ as much as O0's
loss from step to step at the start: random numbers within the model can depend on the dtype.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from ampatch.sweep.measure.run_record import Measured, Run, Series
from ampatch.sweep.trial import BASE, Case

ALLOWED = 32  # units of roundoff
ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8}
TF32 = 2**-11
FP32 = 2**-15
EARLY = 20  # first losses, for their differences from step to step


def other_starts(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """The runs that start differently from the first run with their seed, O0's if there is one.

    Each comes with the difference: `first loss 0.41 against 2.31 of O0 with seed 0`.
    """
    by_seed: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.case != BASE):
        if run.measured is not None:
            by_seed.setdefault(run.trial.seed, []).append(run)
    compared = ((run, first) for first, *others in by_seed.values() for run in others)
    starts = [(run, _difference(run, first)) for run, first in compared]
    return [(run, difference) for run, difference in starts if difference]


def start_note(script: str, starts: Sequence[tuple[Run, str]]) -> str:
    """A note on how rows differ at the start, why, and what to do."""
    if not starts:
        return ""
    run, difference = next((start for start in starts if start[0].case != BASE), starts[0])
    return (
        f"The rows do not start alike: {run.trial.label} has a {difference}, which is "
        f"more than rounding explains. {script} seems to load a file that an earlier trial wrote, "
        "or to draw random numbers that the seed does not decide. Give each trial its own folder: "
        "{trial_dir} among the script's arguments, or the variable AMPATCH_TRIAL_DIR."
    )


def _difference(run: Run, first: Run) -> str:
    ours, theirs = run.measured or Measured(), first.measured or Measured()
    for name in ours.losses.keys() & theirs.losses.keys():
        value, expected = _before_any_step(ours.losses[name]), _before_any_step(theirs.losses[name])
        if value is None or expected is None:
            continue
        roundoff = max(_roundoff(run.case), _roundoff(first.case))
        if abs(value - expected) > _allowed(value, theirs.losses[name], roundoff):
            other = "its first run" if run.case == first.case else first.case.label
            seed = run.trial.seed
            return f"first loss {value:.4g} against {expected:.4g} of {other} with seed {seed}"
    return ""


def _before_any_step(losses: Series) -> float | None:
    """The first loss, if it is a number and no optimizer has stepped before it."""
    if not losses.values or losses.steps[0] or not math.isfinite(losses.values[0]):
        return None
    return losses.values[0]


def _allowed(value: float, expected: Series, roundoff: float) -> float:
    finite = [abs(loss) for loss in expected.values if math.isfinite(loss)]
    size = max(abs(value), finite[0], statistics.median(finite))
    rounding = ALLOWED * roundoff * size
    pairs = itertools.pairwise(expected.values[:EARLY])
    changes = [abs(later - loss) for loss, later in pairs if math.isfinite(later - loss)]
    return max(rounding, statistics.median(changes)) if changes and roundoff != FP32 else rounding


def _roundoff(case: Case) -> float:
    return ROUNDOFF[case.dtype] if case.dtype else TF32 if case.tf32 else FP32
