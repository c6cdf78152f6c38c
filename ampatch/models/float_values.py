"""The FP32 values of a half model, from its masters or from widened copies."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..config.opt_levels import HALF_TYPES
from .float_copies import WidenedCopies


class Masters(Protocol):
    """Finds the FP32 master weights of half parameters."""

    def current(self, half: Tensor) -> Tensor | None:
        """The master of a half parameter, up to date, or None."""

    def show(self, half: Tensor, keep_vars: bool) -> Tensor | None:
        """As `current`, to be handed out and written into; with `keep_vars` the master itself."""

    def load(self, half: Tensor, values: Tensor) -> None:
        """Give the master the values of a checkpoint."""


class FloatValues:
    """The FP32 values of the tensors of managed models, for copies and checkpoints.

    A half tensor with a master has its master's.  One without (O3, frozen weights, buffers) has
    its own, widened by `widened`.  Another tensor stands for itself.
    """

    def __init__(self, masters: Masters) -> None:
        self.masters = masters
        self.widened = WidenedCopies()

    def of(self, tensor: Tensor) -> Tensor:
        """The values, to be read."""
        master = self.masters.current(tensor)
        if master is not None:
            return master
        return self.widened.value(tensor) if tensor.dtype in HALF_TYPES else tensor

    def saved(self, tensor: Tensor, keep_vars: bool) -> Tensor:
        """What a checkpoint holds for a tensor; what is written into it counts."""
        master = self.masters.show(tensor, keep_vars)
        if master is not None:
            return master
        return self.widened.give(tensor) if tensor.dtype in HALF_TYPES else tensor

    def load(self, tensor: Tensor, values: Tensor) -> None:
        """Take the values of a checkpoint to where they are kept in FP32."""
        if self.masters.current(tensor) is not None:
            self.masters.load(tensor, values)
        else:
            self.widened.load(tensor, values)

    def release(self, tensor: Tensor) -> Tensor:
        """The values of a tensor without a master, for the last time."""
        return self.widened.release(tensor) if tensor.dtype in HALF_TYPES else tensor.data
