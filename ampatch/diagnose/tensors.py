"""Tensors in arguments and outputs, notes about them, and their dtypes' names."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampatch.session.facade import tensors_within
from ampatch.torch_private.tensors import memory_of

T = TypeVar("T")

MOST = 512  # more notes than this are searched for those of freed storages


def dtype_name(dtype: torch.dtype) -> str:
    """`"float16"` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def tensors_in(value: Any) -> list[Tensor]:
    """The floating and complex tensors in a value: in lists, tuples, mappings and dataclasses."""
    return [one for one in tensors_within(value) if one.is_floating_point() or one.is_complex()]


class StorageNotes(Generic[T]):
    """One value for each storage, for as long as the storage exists.

    The graph saves tensors as new objects and modules return views, so notes by tensor would
    be lost.  A weak reference prevents that another storage gets the same address.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[StorageWeakRef, T]] = {}
        self._prune_at = MOST

    def get(self, tensor: Tensor) -> T | None:
        known = self._notes.get(storage_key(tensor))
        return None if known is None else known[1]

    def set(self, tensor: Tensor, note: T) -> None:
        if len(self._notes) >= self._prune_at:
            self._notes = {k: v for k, v in self._notes.items() if not v[0].expired()}
            self._prune_at = max(MOST, 2 * len(self._notes))
        storage = values(tensor).untyped_storage()
        self._notes[memory_of(storage)] = (StorageWeakRef(storage), note)


def storage_key(tensor: Tensor) -> int:
    return memory_of(values(tensor).untyped_storage())


def values(tensor: Tensor) -> Tensor:
    """The tensor that holds the numbers: of a sparse one its values."""
    return tensor._values() if tensor.is_sparse else tensor
