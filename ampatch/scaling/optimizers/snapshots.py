"""The one way of going back: weights and optimizer state before something that may be undone.

Closures go back after an overflow, the halves of SAM's step to the weights before the first, a
failing `initialize` to the optimizer's state as it was found.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ...errors import UndoAll

_ABSENT = object()


class Snapshot:
    """Values, and the very objects, to go back to: once, by `restore`, or where a `with` raises.

    That is what the `roots` are: tensors, arrays, and dicts, lists, deques, sets and tuples of them
    at any depth; of an optimizer all that is data in its attributes, `param_groups` and `state`
    included, and the same of optimizers that it holds.  What is created meanwhile vanishes.
    Objects of other kinds are put back where they were, and what is inside them is left alone;
    gradients stay as they are.  Without `values` only containers are noted.
    """

    def __init__(self, *roots: Any, values: bool = True) -> None:
        self._values = values
        self._seen: dict[int, Any] = {}  # by id, and held: an id is not given out twice
        self._restores: list[Callable[[], None]] = []
        self._note_all(roots)

    def restore(self) -> None:
        """Write the values back, if this was not done yet; all of them, whatever one raises."""
        restores, undo = self._restores, UndoAll("the step of an optimizer")
        self.forget()
        with torch.no_grad():
            for restore in restores:
                undo.do(restore)
        undo.end()

    def is_held(self) -> bool:
        """Whether there is something to go back to."""
        return bool(self._restores)

    def forget(self) -> None:
        """There is nothing to go back to any more."""
        self._restores, self._seen = [], {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.restore()

    def _note_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._note(value)

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if self._values:
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
            if self._values:
                self._restores.append(_of_array(value))
        elif hasattr(value, "param_groups"):
            attributes = getattr(value, "__dict__", {})
            self._note_all(attributes.values())
            self._restores.append(_of_attributes(attributes))


def _of_tensor(tensor: Tensor) -> Callable[[], None]:
    place = tensor.detach()  # in the memory it has now: `.data` may be swapped for other memory
    value = _written_once(place).clone()
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided

    def restore() -> None:
        if is_plain and not _same_place(tensor, place):
            tensor.data = place
        with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
            _written_once(tensor).copy_(value)

    return restore


def _written_once(tensor: Tensor) -> Tensor:
    """Each place in memory once: torch writes into no expanded tensor."""
    if tensor.layout is torch.strided:
        for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _same_place(tensor: Tensor, place: Tensor) -> bool:
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
        and tensor.dtype is place.dtype
    )


def _of_array(array: Any) -> Callable[[], None]:
    value = array.copy()
    is_writable = getattr(getattr(array, "flags", None), "writeable", True)  # a scalar is not

    def restore() -> None:
        if is_writable:
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
