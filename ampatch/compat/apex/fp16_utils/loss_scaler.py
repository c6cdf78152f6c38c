"""Loss scales for training loops that unscale by hand.

The attributes have apex's names, because old checkpoints hold these objects
pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .conversion import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class _Scaler:
    cur_scale: float

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss * self.loss_scale).backward(retain_graph=retain_graph)

    def scale_gradient(self, module: Any, grad_in: tuple, grad_out: tuple) -> tuple:
        """A backward hook for modules: their input's gradients times the scale."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)


class LossScaler(_Scaler):
    """A fixed scale, without a check for overflow."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """False: a fixed scale has no check."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing: the scale is fixed."""


class DynamicLossScaler(_Scaler):
    """Divides by `scale_factor` on overflow, multiplies after `scale_window` clean steps.

    The scale never falls below 1.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient holds an inf or NaN.  Waits for the device."""
        return any(
            param.grad is not None and not bool(torch.isfinite(param.grad).all())
            for param in params
        )

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after one step."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
