"""What torch keeps in optimizers, schedulers and GradScalers."""

from __future__ import annotations

from typing import Any


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
