"""Calls torch's `step` and `zero_grad` without profiler range and hook loops that do nothing.

`torch.optim.Optimizer` wraps both in a range for the profiler, and `step` in loops
over hooks.  While no profiler runs and there are no hooks, they only cost time.  A
`step` or `zero_grad` that other code has put there, on the instance or on the class, is
called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ...torch_private.optimizers import (
    GLOBAL_POST_HOOKS,
    GLOBAL_PRE_HOOKS,
    STEP_POST_HOOKS,
    STEP_PRE_HOOKS,
)
from ...torch_private.probes import is_profiling
from .all_steps import are_others


def _code_around_steps() -> Any:
    """The code of torch's wrapper around every `step`; None where this torch has another way."""
    wrap = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda self: None), "__code__", None)


_AROUND_STEPS = _code_around_steps()


def bare_step(original: Any, optimizer: Any) -> Callable | None:
    """The function inside torch's wrapper around a bound `step`, to be called with the optimizer.

    None where the wrapper is not torch's, or has something to do.
    """
    function: Any = getattr(original, "__func__", None)
    if (
        getattr(function, "__code__", None) is not _AROUND_STEPS
        or _AROUND_STEPS is None
        or original.__self__ is not optimizer  # but one that it wraps
        or getattr(optimizer, STEP_PRE_HOOKS, True)
        or getattr(optimizer, STEP_POST_HOOKS, True)
        or are_others(GLOBAL_PRE_HOOKS)
        or are_others(GLOBAL_POST_HOOKS)
        or is_profiling()
    ):
        return None
    return function.__wrapped__


def is_bare_zero_grad(original: Any, optimizer: Any) -> bool:
    """Whether a bound `zero_grad` is torch's own and does no more than drop gradients."""
    return (
        getattr(original, "__func__", None) is Optimizer.zero_grad
        and original.__self__ is optimizer
        and not is_profiling()
    )
