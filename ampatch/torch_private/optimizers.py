"""torch's attributes of optimizers, schedulers and GradScalers, and its wrappers of their methods.

`torch.optim.Optimizer` wraps `step` and `zero_grad` in a range for the profiler, and `step` in
loops over hooks: a tenth of a step of a small model.  While no profiler runs and no hook is set,
the wrapped function is called directly.  A `step` or `zero_grad` of another class is called as is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .probes import is_profiling
from .torch_attributes import torch_attribute

_UNKNOWN_HOOKS = {0: None}  # if torch keeps its hooks elsewhere: treated like a dict with a hook
_WHEN = ("pre", "post")
_GLOBAL_STEP_HOOKS = [
    torch_attribute(f"torch.optim.optimizer._global_optimizer_{when}_hooks", _UNKNOWN_HOOKS)
    for when in _WHEN
]
_STEP_HOOK_NAMES = [f"_optimizer_step_{when}_hooks" for when in _WHEN]


def _code_around_steps() -> Any:
    wrap = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda self: None), "__code__", None)


CODE_AROUND_STEPS = _code_around_steps()
"""The code object of torch's wrapper around each class's `step`, or None if it has no wrapper."""


class _NotifyHook:
    """A hook after every step of any `torch.optim.Optimizer`, managed or not."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def __call__(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._notify()


def notify_of_steps(notify: Callable[[], None]) -> Callable[[], None]:
    """Call `notify()` after every step of any optimizer.  Returns a function that stops this."""
    return register_optimizer_step_post_hook(_NotifyHook(notify)).remove


def unwrapped_step(original: Any, optimizer: Any) -> Callable | None:
    """Return the function inside torch's wrapper around a bound `step`; it takes the optimizer.

    Returns None if the wrapper is not torch's, or is needed for a profiler or hooks.  Hooks of
    ampatch do not count: after a step of its optimizers the session itself drops its half copies.
    """
    function: Any = getattr(original, "__func__", None)
    if (
        CODE_AROUND_STEPS is None
        or getattr(function, "__code__", None) is not CODE_AROUND_STEPS
        or original.__self__ is not optimizer  # the `step` of an optimizer inside `optimizer`
        or is_profiling()
    ):
        return None
    own_hooks = [getattr(optimizer, name, _UNKNOWN_HOOKS) for name in _STEP_HOOK_NAMES]
    for hooks in (*_GLOBAL_STEP_HOOKS, *own_hooks):
        for hook in hooks.values():
            if type(hook) is not _NotifyHook:
                return None
    return function.__wrapped__


def is_bare_zero_grad(original: Any, optimizer: Any) -> bool:
    """Whether a bound `zero_grad` is torch's own and only drops gradients."""
    return (
        getattr(original, "__func__", None) is Optimizer.zero_grad
        and original.__self__ is optimizer
        and not is_profiling()
    )


def skips_in_kernel(optimizer: Any) -> bool:
    """Whether the optimizer's kernels can skip a step.  False if torch cannot tell."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def record_skipped_step(optimizer: Any) -> None:
    """Mark a skipped step as called, or schedulers would warn that `step()` was not called."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True


def forget_unscaling(scaler: Any, optimizer: Any) -> None:
    """Let a `torch.amp.GradScaler` accept another `unscale_` before the step.

    If torch keeps the scaler's state elsewhere, the second `unscale_` raises the scaler's error.
    """
    getattr(scaler, "_per_optimizer_states", {}).pop(id(optimizer), None)


_ZERO_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero_redundancy(optimizer: Any) -> bool:
    """Whether `optimizer` is a `ZeroRedundancyOptimizer`.  Does not import the class."""
    kind = getattr(sys.modules.get(_ZERO_MODULE), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def steps_in_backward(optimizer: Any) -> bool:
    """Whether hooks of DistributedDataParallel call the optimizer's step (`overlap_with_ddp`)."""
    return getattr(optimizer, "_overlap_with_ddp", False)


def build_buckets(optimizer: Any) -> None:
    """Make the parameters of a `ZeroRedundancyOptimizer` views of new buckets, if any."""
    optimizer._build_param_buckets()


def is_in_join(optimizer: Any) -> bool:
    """Whether the optimizer is in a `Join` context, where ranks may have no data left."""
    config = getattr(optimizer, "_join_config", None)
    return config is not None and config.enable
