"""Results that leave for NumPy leave in FP32, as the script expects them.

NumPy has no bfloat16 at all, and sums of float16 overflow at 65504.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..casting.patches import PatchSet


def put(patches: PatchSet, half: torch.dtype) -> None:
    """Have `Tensor.numpy`, and with it `numpy.asarray(tensor)`, give FP32 for `half` tensors."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(self.float() if self.dtype is half else self, *args, **kwargs)

        return numpy

    patches.replace(torch.Tensor, "numpy", make)
