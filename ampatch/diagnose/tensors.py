"""Tensors in arguments and outputs, values kept by storage, and the names of dtypes."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampatch.session.facade import tensors_within
from ampatch.torch_private.tensors import storage_id

T = TypeVar("T")

PRUNE_ABOVE = 512  # with more entries than this, entries of freed storages are dropped


def dtype_name(dtype: torch.dtype) -> str:
    """`"float16"` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def tensors_in(value: Any) -> list[Tensor]:
    """The floating and complex tensors in a value: in lists, tuples, mappings and dataclasses."""
    return [
        tensor
        for tensor in tensors_within(value)
        if tensor.is_floating_point() or tensor.is_complex()
    ]


class ByStorage(Generic[T]):
    """One value for each storage, for as long as the storage exists.

    Values are not kept by tensor, because the graph saves tensors as new objects and modules return
    views.  A weak reference shows whether another storage has the address now.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}
        self._prune_at = PRUNE_ABOVE

    def get(self, tensor: Tensor) -> T | None:
        entry = self._entries.get(storage_key(tensor))
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        if len(self._entries) >= self._prune_at:
            self._entries = {k: v for k, v in self._entries.items() if not v[0].expired()}
            self._prune_at = max(PRUNE_ABOVE, 2 * len(self._entries))
        storage = values(tensor).untyped_storage()
        self._entries[storage_id(storage)] = (StorageWeakRef(storage), value)


def storage_key(tensor: Tensor) -> int:
    return storage_id(values(tensor).untyped_storage())


def values(tensor: Tensor) -> Tensor:
    """The tensor itself, or the values of a sparse tensor."""
    return tensor._values() if tensor.is_sparse else tensor
