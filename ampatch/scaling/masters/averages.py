"""FP32 gradients on their way through DistributedDataParallel, beside those in half weights."""

from __future__ import annotations

import torch
from torch import Tensor


class Averages:
    """Gradients by ids of half weights: `waiting` for the ranks, and `made` of all ranks'."""

    def __init__(self) -> None:
        self.waiting: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}

    def are_there(self) -> bool:
        """Whether there are any."""
        return bool(self.waiting or self.made)

    def widen(self, half: Tensor, grad: Tensor) -> Tensor:
        """The FP32 gradient of a half weight: its average, but for elements changed since.

        `grad` has the elements that are in the half weight, and may be written into.
        """
        average = self.made.pop(id(half), None)
        if average is None or average.shape != grad.shape or grad.is_sparse:
            return grad
        with torch.no_grad():
            return torch.where(average.to(half.dtype) == grad, average, grad, out=grad)

    def forget_of(self, half: Tensor) -> None:
        """The gradient of a half weight is another now."""
        self.waiting.pop(id(half), None)
        self.made.pop(id(half), None)

    def forget(self) -> None:
        """All gradients are elsewhere now, or none."""
        self.waiting.clear()
        self.made.clear()
