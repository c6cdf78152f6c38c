"""Weights and optimizer state before a step that may have to be taken back."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_ABSENT = object()


class Weights:
    """Copies of tensors, to go back to."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._restores = [_of_tensor(tensor) for tensor in tensors]

    def restore(self) -> None:
        """Write the values back."""
        with torch.no_grad():
            for restore in self._restores:
                restore()


class WeightsAndState:
    """What an optimizer updates and remembers, to go back to: values, and the very objects.

    That is all that is data in its attributes: tensors, arrays, numbers, and dicts, lists,
    deques, sets and tuples of them at any depth, `param_groups` and `state` included, and
    the same of optimizers that it holds.  What is created meanwhile vanishes.  Objects of
    other kinds are put back where they were, and what is inside them is left alone;
    gradients stay as they are.
    """

    def __init__(self, optimizer: Any) -> None:
        self._seen: dict[int, Any] = {}  # by id, and held: an id is not given out twice
        self._restores: list[Callable[[], None]] = []
        self._note(optimizer)
        self._note(optimizer.param_groups)  # a wrapper may have a property here

    def restore(self) -> None:
        """Write the values back."""
        with torch.no_grad():
            for restore in self._restores:
                restore()

    def _note(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._restores.append(_of_tensor(value))
        elif isinstance(value, dict):
            self._note_all(value)
            self._note_all(value.values())
            self._restores.append(_refilled(value, value.update, dict(value)))
        elif isinstance(value, (list, collections.deque)):
            self._note_all(value)
            self._restores.append(_refilled(value, value.extend, list(value)))
        elif isinstance(value, set):
            self._restores.append(_refilled(value, value.update, set(value)))
        elif isinstance(value, tuple):
            self._note_all(value)
        elif hasattr(type(value), "__array__"):
            self._restores.append(_of_array(value))
        elif hasattr(value, "param_groups"):
            attributes = getattr(value, "__dict__", {})
            self._note_all(attributes.values())
            self._restores.append(_of_attributes(attributes))

    def _note_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._note(value)


def _of_tensor(tensor: Tensor) -> Callable[[], None]:
    place = tensor.detach()  # in the memory it has now: `.data` may be swapped for other memory
    value = place.clone()
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided

    def restore() -> None:
        if is_plain and not _same_place(tensor, place):
            tensor.data = place
        tensor.copy_(value)

    return restore


def _same_place(tensor: Tensor, place: Tensor) -> bool:
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
        and tensor.dtype is place.dtype
    )


def _of_array(array: Any) -> Callable[[], None]:
    value = array.copy()

    def restore() -> None:
        array[...] = value

    return restore


def _refilled(container: Any, fill: Callable[[Any], None], items: Any) -> Callable[[], None]:
    def restore() -> None:
        container.clear()
        fill(items)

    return restore


def _of_attributes(attributes: dict[str, Any]) -> Callable[[], None]:
    found = dict(attributes)

    def restore() -> None:
        for name in attributes.keys() - found.keys():
            del attributes[name]
        for name, value in found.items():
            if attributes.get(name, _ABSENT) is not value:
                attributes[name] = value

    return restore
