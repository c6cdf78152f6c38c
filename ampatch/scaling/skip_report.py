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
) -> None:
    """Log that `new` more steps were skipped, and an error once a row of them reaches `limit`.

    `names()` maps ids of the model's parameters to their module paths.  The error waits for the
    device.
    """
    kind, row = type(managed.optimizer).__name__, counts.skipped_in_a_row
    is_left_over = row > 1 and managed.gradients.is_left_over()
    logger.info(
        "Gradient overflow: %s skipped %s (%d of %d since initialize)%s.",
        *(kind, "a step" if new == 1 else f"{new} steps"),
        *(counts.skipped, counts.taken + counts.skipped),
        f": {_LEFT_OVER}" if is_left_over else "",
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
