"""FP32 gradients on their way through DistributedDataParallel, beside those in half weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ...torch_private.half_grads import raw_grad, set_raw_grad


class Averages:
    """Gradients by ids of half weights: `waiting` for the ranks, and `made` of all ranks'."""

    def __init__(self) -> None:
        self.waiting: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}
        self._zeros: list[tuple[Tensor, Tensor, int]] = []  # by `wait`, with versions

    def wait(self, half: Tensor, grad: Tensor) -> None:
        """Keep the FP32 gradient of a half weight for the ranks.

        A weight that the pass does not use has to have a gradient of its own, too: zeros.
        """
        self.waiting[id(half)] = grad
        zeros = torch.zeros_like(half.detach())
        set_raw_grad(half, zeros)
        self._zeros.append((half, zeros, zeros._version))

    def settle(self) -> None:
        """Give weights the averages that DDP has not written into them.

        It leaves a weight alone that no rank has used since the last average
        (`find_unused_parameters`), and what is there are the zeros of `wait`.
        """
        still: list[tuple[Tensor, Tensor, int]] = []
        for half, zeros, version in self._zeros:
            if id(half) in self.waiting:
                still.append((half, zeros, version))
            elif id(half) in self.made and raw_grad(half) is zeros and zeros._version == version:
                zeros.copy_(self.made[id(half)])
        self._zeros = still

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
        self._zeros.clear()
