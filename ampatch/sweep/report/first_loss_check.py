"""Compares first losses, to check that all rows with the same seed start from the same weights.

Before the first optimizer step only rounding in half separates a row from O0.  If the first loss
differs by more, the row began with other weights, most often because the script loads a file that
an earlier trial wrote (`w.pt`).  Then rows say nothing about opt levels; none is recommended.

Two first losses may differ by 32 units of roundoff (docs/explanation/sweep_figures.md has the
measurements), and in FP32 by 2**-10, because kernels sum in different orders.  These limits are
relative to the larger of the two losses, or to O0's median loss if that is larger.  A row in half
may also differ as much as O0's loss changes from step to step at the start, because random numbers
within the model can depend on the dtype.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from ampatch.sweep.measure.run_record import Measured, Run, Series
from ampatch.sweep.trial import BASE, Case

MAX_ROUNDOFFS = 32  # units of roundoff by which first losses may differ
HALF_ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8}
TF32_ROUNDOFF = 2**-11
FP32_TOLERANCE = 2**-15  # times 32: 2**-10, for kernels that sum in different orders
NUM_EARLY_LOSSES = 20  # losses whose changes from step to step count as changes at the start


def first_loss_differences(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """The runs whose first loss differs from the first run's with their seed, O0's if it has run.

    Each comes with the difference: `first loss 0.41 against 2.31 of O0 with seed 0`.
    """
    by_seed: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.case != BASE):
        if run.measured is not None:
            by_seed.setdefault(run.trial.seed, []).append(run)
    pairs = ((run, first) for first, *later in by_seed.values() for run in later)
    compared = [(run, _difference(run, first)) for run, first in pairs]
    return [(run, difference) for run, difference in compared if difference]


def first_loss_note(script: str, differences: Sequence[tuple[Run, str]]) -> str:
    """A note on how rows differ at the start, why, and what to do."""
    if not differences:
        return ""
    run, difference = next((d for d in differences if d[0].case != BASE), differences[0])
    return (
        f"The rows do not start alike: {run.trial.label} has a {difference}, which is "
        f"more than rounding explains. {script} seems to load a file that an earlier trial wrote, "
        "or to draw random numbers that the seed does not decide. Give each trial its own folder: "
        "{trial_dir} among the script's arguments, or the variable AMPATCH_TRIAL_DIR."
    )


def _difference(run: Run, first: Run) -> str:
    """How the first losses of two runs differ by more than rounding, as text; "" if they do not."""
    losses = (run.measured or Measured()).losses
    expected_losses = (first.measured or Measured()).losses
    for name in losses.keys() & expected_losses.keys():
        value, expected = map(_before_any_step, (losses[name], expected_losses[name]))
        if value is None or expected is None:
            continue
        roundoff = max(_roundoff(run.case), _roundoff(first.case))
        if abs(value - expected) > _max_difference(value, expected_losses[name], roundoff):
            owner = "its first run" if run.case == first.case else first.case.label
            seed = run.trial.seed
            return f"first loss {value:.4g} against {expected:.4g} of {owner} with seed {seed}"
    return ""


def _before_any_step(losses: Series) -> float | None:
    """The first loss; None if it is not finite, or if an optimizer has stepped before it."""
    if not losses.values or losses.steps[0] or not math.isfinite(losses.values[0]):
        return None
    return losses.values[0]


def _max_difference(value: float, expected: Series, roundoff: float) -> float:
    """By how much `value` may differ from the first of the `expected` losses."""
    finite = [abs(loss) for loss in expected.values if math.isfinite(loss)]
    size = max(abs(value), finite[0], statistics.median(finite))
    limit = MAX_ROUNDOFFS * roundoff * size
    pairs = itertools.pairwise(expected.values[:NUM_EARLY_LOSSES])
    changes = [abs(later - loss) for loss, later in pairs if math.isfinite(later - loss)]
    if not changes or roundoff == FP32_TOLERANCE:
        return limit
    return max(limit, statistics.median(changes))


def _roundoff(case: Case) -> float:
    if case.dtype:
        return HALF_ROUNDOFF[case.dtype]
    return TF32_ROUNDOFF if case.tf32 else FP32_TOLERANCE
