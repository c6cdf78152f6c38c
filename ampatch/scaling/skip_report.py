"""The messages about skipped steps: a line for each, and an error for many in a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..log import logger
from .optimizer import ManagedOptimizer
from .scale_value import values
from .step_counts import StepCounts

_SHOWN = 5  # parameters named
_EACH = 10  # skips in a row from which not each one has a line
_LEFT_OVER = (
    "gradients of an earlier overflow are still in p.grad; call optimizer.zero_grad() after each "
    "step, also after a skipped one"
)


def say(
    managed: ManagedOptimizer,
    counts: StepCounts,
    new: int,
    limit: int,
    names: Callable[[], dict[int, str]],
    loss: Tensor | None,
) -> bool:
    """Log that `new` more steps were skipped, and an error once a row of them reaches `limit`.

    From the tenth in a row on each doubling has its line.  `names()` maps ids of the model's
    parameters to their module paths.  Returns whether the last `loss`, where it is still there, is
    no finite number, which is said.  The error, and the look at the loss, wait for the device.
    """
    kind, row = type(managed.optimizer).__name__, counts.skipped_in_a_row
    is_left_over = row > 1 and managed.gradients.is_left_over()
    words = "a step" if new == 1 else f"{new} steps"
    if row >= _EACH:
        words = f"{row} steps in a row"
    if row < _EACH or (row // _EACH).bit_length() > (max(0, row - new) // _EACH).bit_length():
        logger.info(
            "Gradient overflow: %s skipped %s (%d of %d since initialize)%s.",
            *(kind, words, counts.skipped, counts.taken + counts.skipped),
            f": {_LEFT_OVER}" if is_left_over else "",
        )
    is_bad = loss is not None and not _is_finite(loss)
    if is_bad:
        logger.warning(
            "The loss is inf or NaN before it is scaled: the forward makes it, and no loss scale "
            "cures it. To see where: ampatch run --debug SCRIPT, or ampatch.debug(model)."
        )
    if row >= limit > row - new and is_left_over:
        logger.error(
            "%d steps of %s in a row were skipped. The last one had finite new gradients, but %s. "
            "First such gradients: %s.",
            *(row, kind, _LEFT_OVER, _offenders(managed, names())),
        )
    elif row >= limit > row - new:
        logger.error(
            "%d steps of %s in a row were skipped because gradients held inf or NaN. First such "
            "gradients: %s. Where ampatch.loss_scale() is small, float16 does not overflow: look "
            "for a NaN in the data, the loss or the weights, or try dtype=torch.bfloat16, "
            'overrides={"path.*": "float"} for these modules, opt_level="O0" or a lower learning '
            "rate.",
            *(row, kind, _offenders(managed, names())),
        )
    return is_bad


def _offenders(managed: ManagedOptimizer, names: dict[int, str]) -> str:
    bad = []
    for group, params in enumerate(group["params"] for group in managed.optimizer.param_groups):
        for index, param in enumerate(params):
            if param.grad is not None and not _is_finite(param.grad):
                bad.append(names.get(id(param)) or f"param_groups[{group}]['params'][{index}]")
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return (", ".join(bad[:_SHOWN]) + more) or "none here now (zeroed since, or on another rank)"


def _is_finite(grad: Tensor) -> bool:
    return bool(torch.isfinite(values(grad)).all())
