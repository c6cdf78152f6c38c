"""O3, and O0 of half models: weights and buffers whose dtype is changed, and changed back.

The parameters stay the same objects, only their `.data` changes, because optimizers, schedulers
and scripts hold references to them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casting.rules import CASTABLE
from ..errors import UndoAll
from ..torch_private.dtensors import exchange_data
from .lent_places import StaysFloat
from .module_overrides import has_statistics

_data: Any = torch.Tensor.data  # torch's own: sessions replace that of parameters


class Converted(NamedTuple):
    """A parameter or buffer whose dtype was changed, and the values and gradient it had."""

    tensor: Tensor
    dtype: torch.dtype
    original: Tensor
    grad: Tensor | None


class ConvertedWeights:
    """The weights and buffers of one model whose dtype is changed, by their ids."""

    def __init__(self) -> None:
        self.entries: dict[int, Converted] = {}

    def convert(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_float: StaysFloat,
        leave: Collection[int] = (),
    ) -> None:
        """Convert a model's FP32 and half parameters in place, to FP32 where `stays_float`.

        FP32 buffers stay as they are, but for the statistics of a norm, whose kernels want them in
        the dtype of its weights.  Tensors shared between modules are converted once, and parameters
        that share their memory go on sharing it.  Those in `leave` (ids) stay as they are.
        """
        in_place: dict[tuple, Tensor] = {}
        for module in model.modules():
            target = torch.float32 if stays_float(module) else dtype
            tensors: list[Tensor] = list(module.parameters(recurse=False))
            tensors += [
                buffer
                for buffer in module.buffers(recurse=False)
                if buffer.dtype is not torch.float32 or has_statistics(module)
            ]
            for tensor in tensors:
                found, key = tensor.dtype, id(tensor)
                if found not in CASTABLE or found is target or key in leave or key in self.entries:
                    continue
                data = _data.__get__(tensor)
                self.entries[key] = Converted(tensor, found, data, tensor.grad)
                place = (*_place(data), target)
                set_data(tensor, in_place.setdefault(place, data.to(target)))
        if self.entries:
            _flatten_rnns(model)

    def forget(self, ids: Collection[int]) -> dict[int, Converted]:
        """Take these out: nothing changes them back.  Returns them by their ids."""
        return {key: self.entries.pop(key) for key in set(ids) & set(self.entries)}

    def forget_originals(self) -> None:
        """Let go of the unconverted values."""
        for key, entry in self.entries.items():
            self.entries[key] = entry._replace(original=entry.tensor, grad=None)

    def restore(self, ids: Collection[int]) -> None:
        """Change these back."""
        for entry in self.forget(ids).values():
            _restore(entry)

    def restore_all(self, model: nn.Module, undo: UndoAll) -> None:
        """Change all back."""
        for entry in self.entries.values():
            undo.do(_restore, entry)
        if self.entries:
            undo.do(_flatten_rnns, model)
        self.entries.clear()


def _restore(entry: Converted) -> None:
    tensor, dtype, original, grad = entry
    if tensor.dtype is dtype:  # it is done
        return
    if original.dtype is dtype:  # not yet forgotten, and exact: `open` failed half-way
        tensor.grad = None
        exchange_data(tensor, original)
        tensor.grad = grad
    else:
        set_data(tensor, tensor.detach().to(dtype))


def _place(data: Tensor) -> tuple:
    """Equal for tensors that are the same numbers in the same memory."""
    if type(data) is not Tensor or data.layout is not torch.strided or not data.data_ptr():
        return (id(data),)
    return data.data_ptr(), data.dtype, data.shape, data.stride()


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data of perhaps another dtype; its gradient goes along."""
    grad, tensor.grad = tensor.grad, None
    exchange_data(tensor, data)
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def _flatten_rnns(model: nn.Module) -> None:
    """cuDNN wants the weights of an RNN in one piece; new data is not."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
