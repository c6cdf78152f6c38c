"""Do all rows start from the same weights?  Their first losses with equal seeds say it.

Before the first optimizer step nothing but half's rounding lies between a row and O0.  A row
whose first loss differs by more began from something else: most often from a file that an
earlier trial wrote, such as `w.pt`, which the script loads if it is there.  Then the rows say
nothing about opt levels, and none is recommended.

Rounding may do 32 units of roundoff (docs/explanation/sweep_figures.md has what was measured); in
FP32 2**-10, for kernels that add up in another order.
The loss that this is relative to is the larger of the two, or O0's usual one where that is larger.
A row in half may also differ as O0's loss does from step to step at the start: what is drawn at
random within the model can be another draw in another type.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from ampatch.sweep.measure.record import Measured, Run, Series
from ampatch.sweep.trial import BASE, Case

ALLOWED = 32  # units of roundoff
ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8}
TF32 = 2**-11
FP32 = 2**-15
EARLY = 20  # losses from which it is seen how far they differ from step to step


def other_starts(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """The runs that began elsewhere than the first run with their seed, of O0 if there is one.

    With each what differs: `first loss 0.41 against 2.31 of O0 with seed 0`.
    """
    by_seed: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.case != BASE):
        if run.measured is not None:
            by_seed.setdefault(run.trial.seed, []).append(run)
    compared = ((run, first) for first, *others in by_seed.values() for run in others)
    starts = [(run, _difference(run, first)) for run, first in compared]
    return [(run, difference) for run, difference in starts if difference]


def start_note(script: str, starts: Sequence[tuple[Run, str]]) -> str:
    """How they differ, why that may be, and what to do."""
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
            of = "its first run" if run.case == first.case else first.case.label
            seed = run.trial.seed
            return f"first loss {value:.4g} against {expected:.4g} of {of} with seed {seed}"
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
    apart = [abs(later - loss) for loss, later in pairs if math.isfinite(later - loss)]
    return max(rounding, statistics.median(apart)) if apart and roundoff != FP32 else rounding


def _roundoff(case: Case) -> float:
    return ROUNDOFF[case.dtype] if case.dtype else TF32 if case.tf32 else FP32
