"""apex.amp.scaler: the loss scale as an object that a script asks, sets and moves by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .amp_c import multi_tensor_axpby, multi_tensor_scale

__all__ = ["LossScaler"]

_CHUNK = 2048 * 32  # apex's, of a kernel


class Unscaling:
    """What apex's scalers do with lists of gradients; they note an overflow in `_overflow_buf`."""

    has_fused_kernel = True
    dynamic: bool
    _has_overflow: bool
    _overflow_buf: Tensor

    def loss_scale(self) -> float:
        """The scale."""
        raise NotImplementedError

    def clear_overflow_state(self) -> None:
        """Forget what was noted."""
        self._has_overflow = False
        self._overflow_buf.zero_()

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float = 1.0,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write `model_grads` divided by the scale into `master_grads`; not after an overflow."""
        if self._has_overflow:
            return
        scale = self.loss_scale() if scale_override is None else scale_override
        if scale != 1.0 or self.dynamic or not models_are_masters:
            lists = [list(model_grads), list(master_grads)]
            multi_tensor_scale(_CHUNK, self._overflow_buf, lists, 1.0 / scale)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: Sequence[float] | None = None,
    ) -> None:
        """As `unscale`, plus gradients of an earlier pass.

        `scale_override`: the scales of the new gradients, of the earlier ones, and of the sum.
        """
        if self._has_overflow:
            return
        new, earlier, out = scale_override or (self.loss_scale(), 1.0, 1.0)
        lists = [list(model_grads), list(stashed_master_grads), list(master_grads)]
        multi_tensor_axpby(_CHUNK, self._overflow_buf, lists, out / new, out / earlier, 0)


class LossScaler(Unscaling):
    """A loss scale for a script that unscales by itself.

    Args:
        loss_scale: a number, or "dynamic".
        init_scale: where a dynamic scale begins, at most `max_loss_scale`.
        scale_factor: it is divided by this on overflow, and multiplied after `scale_window` clean
            steps in a row.
        min_loss_scale, max_loss_scale: its limits; None: 2**-24, so that it never is 0.

    Pickled attributes have apex's names: checkpoints hold this object.
    """

    _scale_factor = 2.0

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        start: Any = min(init_scale, max_loss_scale) if self.dynamic else loss_scale
        self._loss_scale = float(start)
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._scale_factor = scale_factor
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int)

    def loss_scale(self) -> float:
        """The scale."""
        return self._loss_scale

    def update_scale(self) -> bool:
        """React to one step, by what was noted; returns whether to leave it out.  Waits."""
        if not self.dynamic:
            self._unskipped += 1
            return False
        self._has_overflow = self._has_overflow or bool(self._overflow_buf.item())
        if self._has_overflow:
            floor = self._min_loss_scale or 2.0**-24
            self._loss_scale = max(floor, self._loss_scale / self._scale_factor)
            self._unskipped = 0
            return True
        self._unskipped += 1
        if self._unskipped == self._scale_seq_len:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * self._scale_factor)
            self._unskipped = 0
        return False
