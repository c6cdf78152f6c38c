"""Whole lists of tensors at once, where this torch can; one by one where it cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from torch import _foreach_add_ as add_
    from torch import _foreach_copy_ as copy_
    from torch import _foreach_mul_ as mul_
except ImportError:

    def add_(targets: list[Tensor], values: list[Tensor]) -> None:
        """Add each value to its target, whatever their dtypes."""
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                target.add_(value)

    def copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy each source into its target, whatever their dtypes."""
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def mul_(tensors: list[Tensor], factor: Any) -> None:
        """Multiply each tensor in place."""
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(factor)


__all__ = ["add_", "copy_", "mul_"]
