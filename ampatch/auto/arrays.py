"""Makes half tensors FP32 arrays in NumPy, as a script without AMP code expects.

NumPy has no bfloat16, and sums of float16 overflow at 65504.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..session.facade import PatchSet


def install(patches: PatchSet, half: torch.dtype) -> None:
    """Make `Tensor.numpy` and `numpy.asarray(tensor)` return FP32 for `half` tensors."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(self.float() if self.dtype is half else self, *args, **kwargs)

        return numpy

    patches.replace(torch.Tensor, "numpy", make)
