"""What to say when step after step is skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from .grads import values
from .loss_scaler import Scaler
from .optimizer import ManagedOptimizer

_SHOWN = 5  # parameters named
_ENDS = 4  # scales shown from the beginning and from the end of a long history


def skip_report(managed: ManagedOptimizer, names: dict[int, str], scalers: list[Scaler]) -> str:
    """Name the first parameters with non-finite gradients, the scale's history, and what to try.

    `names` maps ids of the model's parameters to their module paths.  Waits for the device.
    """
    return (
        f"{managed.counter.read().skipped_in_a_row} steps of {type(managed.optimizer).__name__} "
        "in a row were skipped because gradients held inf or NaN. "
        f"First such gradients: {_offenders(managed, names)}. {_histories(scalers)} "
        "At a small scale this is no overflow of float16 any more: look for a NaN in the data, "
        'the loss or the weights, or try dtype=torch.bfloat16, overrides={"path.*": "float"} for '
        'these modules, opt_level="O0" or a lower learning rate.'
    )


def _offenders(managed: ManagedOptimizer, names: dict[int, str]) -> str:
    bad = []
    for group, params in enumerate(group["params"] for group in managed.optimizer.param_groups):
        for index, param in enumerate(params):
            if param.grad is not None and not _is_finite(param.grad):
                half = managed.masters.half_of(param)
                name = names.get(id(param if half is None else half))
                bad.append(name or f"param_groups[{group}]['params'][{index}]")
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return (", ".join(bad[:_SHOWN]) + more) or "none here now (zeroed since, or on another rank)"


def _is_finite(grad: Tensor) -> bool:
    return bool(torch.isfinite(values(grad)).all())


def _histories(scalers: list[Scaler]) -> str:
    told = []
    for loss_id, scaler in enumerate(scalers):
        which = f" of loss {loss_id}" if len(scalers) > 1 else ""
        told.append(f"The loss scale{which} went {_history(scaler.history())}.")
    return " ".join(told)


def _history(scales: list[float]) -> str:
    shown = [f"{scale:g}" for scale in scales]
    if len(shown) > 2 * _ENDS:
        shown = [*shown[:_ENDS], "...", *shown[-_ENDS:]]
    return " -> ".join(shown)
