"""O3, and O0 of half models: converts weights and buffers to another dtype, and back.

The parameters stay the same objects, because optimizers, schedulers and scripts refer to them.
Only `.data` of a parameter changes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casting.rules import CASTABLE_DTYPES
from ..errors import UndoAll
from ..torch_private.dtensors import replace_data
from .half_copy_slots import Fp32Predicate
from .module_overrides import is_batch_or_instance_norm

_data_property: Any = torch.Tensor.data  # torch's own property: sessions patch `Tensor.data`


class ConvertedTensor(NamedTuple):
    """A parameter or buffer whose dtype was changed; its former dtype, values and gradient."""

    tensor: Tensor
    dtype: torch.dtype
    original: Tensor
    grad: Tensor | None


class ConvertedWeights:
    """The weights and buffers of one model whose dtype was changed."""

    def __init__(self) -> None:
        self.entries: dict[int, ConvertedTensor] = {}  # by the id of the tensor

    def convert(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        stays_fp32: Fp32Predicate,
        excluded: Collection[int] = (),
    ) -> None:
        """Convert a model's FP32 and half parameters in place to `dtype`.

        Modules for which `stays_fp32(module)` is true are converted to FP32.  FP32 buffers are not
        converted, except the statistics of norms, whose kernels need the dtype of the weights.
        Tensors shared between modules are converted once, and parameters that share memory still
        share it.  Tensors in `excluded` (ids) are not converted.
        """
        by_memory: dict[tuple, Tensor] = {}  # the converted data, by `_memory_key` and dtype
        for module in model.modules():
            target = torch.float32 if stays_fp32(module) else dtype
            tensors: list[Tensor] = list(module.parameters(recurse=False))
            tensors += [
                buffer
                for buffer in module.buffers(recurse=False)
                if buffer.dtype is not torch.float32 or is_batch_or_instance_norm(module)
            ]
            for tensor in tensors:
                dtype_before, key = tensor.dtype, id(tensor)
                is_known = key in excluded or key in self.entries
                if is_known or dtype_before not in CASTABLE_DTYPES or dtype_before is target:
                    continue
                data = _data_property.__get__(tensor)
                self.entries[key] = ConvertedTensor(tensor, dtype_before, data, tensor.grad)
                memory = (*_memory_key(data), target)
                set_data(tensor, by_memory.setdefault(memory, data.to(target)))
        if self.entries:
            _flatten_rnns(model)

    def forget(self, ids: Collection[int]) -> dict[int, ConvertedTensor]:
        """Remove and return these entries, so that the tensors are not changed back."""
        return {key: self.entries.pop(key) for key in set(ids) & set(self.entries)}

    def forget_originals(self) -> None:
        """Drop the original values and gradients, so that `restore` casts the present values."""
        for key, entry in self.entries.items():
            self.entries[key] = entry._replace(original=entry.tensor, grad=None)

    def restore(self, ids: Collection[int]) -> None:
        """Change the tensors with these ids back."""
        for entry in self.forget(ids).values():
            _restore(entry)

    def restore_all(self, model: nn.Module, undo: UndoAll) -> None:
        """Change all tensors back."""
        for entry in self.entries.values():
            undo.do(_restore, entry)
        if self.entries:
            undo.do(_flatten_rnns, model)
        self.entries.clear()


def _restore(entry: ConvertedTensor) -> None:
    tensor, dtype, original, grad = entry
    if tensor.dtype is dtype:  # changed back already
        return
    if original.dtype is dtype:  # `initialize` has failed: the exact values are still there
        tensor.grad = None
        replace_data(tensor, original)
        tensor.grad = grad
    else:
        set_data(tensor, tensor.detach().to(dtype))


def _memory_key(data: Tensor) -> tuple:
    """A key that is equal for tensors with the same memory, dtype, shape and strides."""
    if type(data) is not Tensor or data.layout is not torch.strided or not data.data_ptr():
        return (id(data),)
    return data.data_ptr(), data.dtype, data.shape, data.stride()


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Replace the tensor's data in place.  If the dtype changes, the gradient is cast to it."""
    grad, tensor.grad = tensor.grad, None
    replace_data(tensor, data)
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def _flatten_rnns(model: nn.Module) -> None:
    """Put the weights of each RNN in one storage again, as cuDNN needs them."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
