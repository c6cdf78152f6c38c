"""apex.multi_tensor_apply: calls the functions of amp_C with lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls `op(chunk_size, noop_flag, tensor_lists, *args)`.

    `available` is True, because scripts refuse to start otherwise.  A call of a function that
    `amp_C` does not have raises an error.
    """

    available = True
    warned = True

    def __init__(self, chunk_size: int = 2048 * 32) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable, noop_flag: Tensor, tensor_lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply()
