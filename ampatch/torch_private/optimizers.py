"""What torch keeps in optimizers, schedulers and GradScalers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from .lookup import of_torch

_UNKNOWN = {0: None}  # one hook that is nobody's
_WHEN = ("pre", "post")
_FOR_ALL = [
    of_torch(f"torch.optim.optimizer._global_optimizer_{when}_hooks", _UNKNOWN) for when in _WHEN
]


def _code_around_steps() -> Any:
    wrap = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda self: None), "__code__", None)


CODE_AROUND_STEPS = _code_around_steps()
"""The code of the function in which torch wraps each class's `step`; None: it does not so."""


def hooks_of_steps(optimizer: Any) -> list[Any]:
    """What torch's wrapper calls around `step`.  Unknown: None is among them."""
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", _UNKNOWN) for when in _WHEN]
    return [hook for hooks in (*_FOR_ALL, *own) for hook in hooks.values()]


def skips_in_kernel(optimizer: Any) -> bool:
    """Whether the optimizer's kernels leave a step out by themselves.  Unknown: they do not."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def note_skipped_step(optimizer: Any) -> None:
    """A scheduler must not think that the step was forgotten.

    Without torch's mark it warns once that it was called before `optimizer.step()`.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True


def forget_unscaling(scaler: Any, optimizer: Any) -> None:
    """Have a `torch.amp.GradScaler` take another `unscale_` before the step.

    Where that cannot be done it refuses the second `unscale_` by an error of its own.
    """
    getattr(scaler, "_per_optimizer_states", {}).pop(id(optimizer), None)
