"""torch's own `step` and `zero_grad` without what surrounds them, where that does nothing.

`torch.optim.Optimizer` wraps both in a range for the profiler, and `step` in loops over hooks: a
tenth of a step of a small model, where a step is mostly calls.  While no profiler runs and no hook
waits, the function inside is called.  A `step` or `zero_grad` that is not torch's is called as it
is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...torch_private.optimizers import CODE_AROUND_STEPS, hooks_of_steps
from ...torch_private.probes import is_profiling


class _Notify:
    """A hook after every step of a `torch.optim.Optimizer`, of those that nobody manages too."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def __call__(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._notify()


def notify_of_steps(notify: Callable[[], None]) -> Callable[[], None]:
    """Have `notify()` called after every step of any optimizer; returns what ends it."""
    return register_optimizer_step_post_hook(_Notify(notify)).remove


def bare_step(original: Any, optimizer: Any) -> Callable | None:
    """The function inside torch's wrapper around a bound `step`, to be called with the optimizer.

    None where the wrapper is not torch's or has something to do.  Ampatch's own hook does not
    count: after a step of its optimizers the session itself drops its copies.
    """
    function: Any = getattr(original, "__func__", None)
    if (
        CODE_AROUND_STEPS is None
        or getattr(function, "__code__", None) is not CODE_AROUND_STEPS
        or original.__self__ is not optimizer  # but one that it wraps
        or is_profiling()
    ):
        return None
    for hook in hooks_of_steps(optimizer):
        if type(hook) is not _Notify:
            return None
    return function.__wrapped__


def is_bare_zero_grad(original: Any, optimizer: Any) -> bool:
    """Whether a bound `zero_grad` is torch's own and does no more than drop gradients."""
    return (
        getattr(original, "__func__", None) is Optimizer.zero_grad
        and original.__self__ is optimizer
        and not is_profiling()
    )
