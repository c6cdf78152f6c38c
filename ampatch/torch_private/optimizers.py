"""torch's attributes of optimizers, schedulers and GradScalers, and its wrappers of their methods.

`torch.optim.Optimizer` wraps `step` and `zero_grad` in a range for the profiler, and `step` in
loops over hooks: a tenth of a step of a small model.  While no profiler runs and no hook is set,
the function inside is called.  A `step` or `zero_grad` that is not torch's is called as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .probes import is_profiling
from .torch_attributes import torch_attribute

_UNKNOWN = {0: None}  # if torch keeps its hooks elsewhere: as if one were set
_WHEN = ("pre", "post")
_FOR_ALL = [
    torch_attribute(f"torch.optim.optimizer._global_optimizer_{when}_hooks", _UNKNOWN)
    for when in _WHEN
]
_OWN = [f"_optimizer_step_{when}_hooks" for when in _WHEN]


def _code_around_steps() -> Any:
    wrap = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda self: None), "__code__", None)


CODE_AROUND_STEPS = _code_around_steps()
"""The code of the function in which torch wraps each class's `step`; None: there is none."""


class _Notify:
    """A hook after every step of any `torch.optim.Optimizer`, managed or not."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def __call__(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._notify()


def notify_of_steps(notify: Callable[[], None]) -> Callable[[], None]:
    """Have `notify()` called after every step of any optimizer; returns a function that ends it."""
    return register_optimizer_step_post_hook(_Notify(notify)).remove


def bare_step(original: Any, optimizer: Any) -> Callable | None:
    """The function inside torch's wrapper around a bound `step`, to be called with the optimizer.

    None if the wrapper is not torch's, or has work to do: a profile, or hooks.  Hooks of ampatch do
    not count: after a step of its optimizers the session itself drops its half copies.
    """
    function: Any = getattr(original, "__func__", None)
    if (
        CODE_AROUND_STEPS is None
        or getattr(function, "__code__", None) is not CODE_AROUND_STEPS
        or original.__self__ is not optimizer  # of an optimizer inside it
        or is_profiling()
    ):
        return None
    of_optimizer = [getattr(optimizer, name, _UNKNOWN) for name in _OWN]
    for hooks in (*_FOR_ALL, *of_optimizer):
        for hook in hooks.values():
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


def skips_in_kernel(optimizer: Any) -> bool:
    """Whether the optimizer's kernels can skip a step.  Unknown: they cannot."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def record_skipped_step(optimizer: Any) -> None:
    """Mark a skipped step for schedulers, which else warn that `optimizer.step()` was forgotten."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True


def forget_unscaling(scaler: Any, optimizer: Any) -> None:
    """Let a `torch.amp.GradScaler` accept another `unscale_` before the step.

    Where torch keeps its state elsewhere, the scaler's own error refuses the second `unscale_`.
    """
    getattr(scaler, "_per_optimizer_states", {}).pop(id(optimizer), None)


_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero_redundancy(optimizer: Any) -> bool:
    """Whether it is a `ZeroRedundancyOptimizer`.  While nothing has imported the class, none is."""
    kind = getattr(sys.modules.get(_ZERO), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def steps_in_backward(optimizer: Any) -> bool:
    """Whether hooks of DistributedDataParallel call the optimizer's step (`overlap_with_ddp`)."""
    return getattr(optimizer, "_overlap_with_ddp", False)


def build_buckets(optimizer: Any) -> None:
    """Make the optimizer's parameters views of new buckets, if it has buckets."""
    optimizer._build_param_buckets()


def is_in_join(optimizer: Any) -> bool:
    """Whether the optimizer is in a `Join` context, where ranks may have no data left."""
    config = getattr(optimizer, "_join_config", None)
    return config is not None and config.enable
