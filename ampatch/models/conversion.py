"""O0, O2, O3: models whose weights, inputs and outputs are converted.

The parameters stay the same objects, only their `.data` changes, because
optimizers, schedulers and scripts hold references to them.  Hooks, not a
replaced `forward`, do the work around a call: they survive deepcopy, pickle
and DataParallel replicas.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

from ..torch_private.dtensors import exchange_data
from ..torch_private.modules import (
    BATCH_NORMS,
    INSTANCE_NORMS,
    TORCH_BATCH_NORMS,
    TORCH_INSTANCE_NORMS,
)

_NORM_NAMES = {norm.__name__ for norm in (*TORCH_BATCH_NORMS, *TORCH_INSTANCE_NORMS)}

_data: Any = torch.Tensor.data  # torch's own: sessions replace that of parameters

CASTABLE = frozenset((torch.float32, torch.float16, torch.bfloat16))
"""What is ever converted: not float64, and not the floats of 8 bits."""


def map_tensors(value: Any, convert: Callable[[Any], Any], copied: list | None = None) -> Any:
    """`value` with `convert` applied to each tensor in it; container types are kept.

    Looks into mappings (`ModelOutput`-like ones too), lists, tuples,
    namedtuples and dataclasses; anything else is returned as it is, and so is
    a container in which nothing changed.  A torch.fx proxy counts as a tensor.
    Lists and mutable mappings of which a copy is made are noted in `copied`: the
    original, the copy, and another copy of its items.
    """
    if isinstance(value, (Tensor, torch.fx.Proxy)):
        return convert(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, convert, copied) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        mapped = _with_items(value, items)
        if copied is not None and isinstance(value, MutableMapping):
            copied.append((value, mapped, items))
        return mapped
    if isinstance(value, (list, tuple)):
        listed = [map_tensors(item, convert, copied) for item in value]
        if all(new is old for new, old in zip(listed, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*listed)
        mapped = type(value)(listed)
        if copied is not None and isinstance(value, list):
            copied.append((value, mapped, listed))
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, convert, copied)
    return value


def _with_items(value: Any, items: dict) -> Any:
    if type(value) in (dict, OrderedDict):
        return type(value)(items)
    if not isinstance(value, MutableMapping):
        return type(value)(items)
    try:
        mapped = copy.copy(value)
    except TypeError:  # copying calls its constructor, and that asks for more
        mapped = type(value).__new__(type(value))
        vars(mapped).update(vars(value))
    for key, item in items.items():
        mapped[key] = item
    return mapped


def _map_dataclass(value: Any, convert: Callable, copied: list | None) -> Any:
    old = {
        f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)
    }
    items = {name: map_tensors(item, convert, copied) for name, item in old.items()}
    if all(items[name] is old[name] for name in items):
        return value
    mapped = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(mapped, name, item)  # it may be frozen
    return mapped


def caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Converts FP32 and half tensors to `dtype` and leaves the others alone.

    Where torch.fx is recording, the conversion of whatever a proxy stands for is recorded.
    """

    def convert(tensor: Any) -> Any:
        if isinstance(tensor, torch.fx.Proxy):
            record = tensor.tracer.create_proxy
            return record("call_function", cast_tensors, (tensor, dtype), {})
        return tensor.to(dtype) if tensor.dtype in CASTABLE else tensor

    return convert


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """`value` with each FP32 or half tensor in it converted to `dtype`."""
    if type(value) is Tensor:
        found = value.dtype
        return value.to(dtype) if found is not dtype and found in CASTABLE else value
    return map_tensors(value, caster(dtype))


class Converted(NamedTuple):
    """A parameter or buffer whose dtype was changed, and the values and gradient it had."""

    tensor: Tensor
    dtype: torch.dtype
    original: Tensor
    grad: Tensor | None


def is_instance_norm(module: nn.Module) -> bool:
    """Whether it is an InstanceNorm that is no TorchScript."""
    return isinstance(module, INSTANCE_NORMS)


def has_statistics(module: nn.Module) -> bool:
    """Whether `keep_batchnorm_fp32` is about this module.

    So it is for BatchNorm, SyncBatchNorm, InstanceNorm with running statistics, and scripted ones.
    """
    if isinstance(module, torch.jit.ScriptModule):
        known = module.original_name in _NORM_NAMES
        return known and getattr(module, "running_mean", None) is not None
    if isinstance(module, INSTANCE_NORMS):
        return module.running_mean is not None
    return isinstance(module, BATCH_NORMS)


def convert_weights(
    model: nn.Module,
    dtype: torch.dtype,
    skip: Callable[[nn.Module], bool],
    skipped_dtype: torch.dtype = torch.float32,
    leave: Collection[int] = (),
) -> list[Converted]:
    """Convert parameters in FP32 or half in place; returns what was changed, and from what.

    Modules for which `skip` is true go to `skipped_dtype` instead.  FP32 buffers stay as
    they are, but for the statistics of a norm, whose kernels want them in the dtype
    of its weights.  Tensors shared between modules are converted once, and parameters that share
    their memory go on sharing it.  Those in `leave` (ids) stay as they are.
    """
    converted: dict[int, Converted] = {}
    in_place: dict[tuple, Tensor] = {}
    for module in model.modules():
        target = skipped_dtype if skip(module) else dtype
        tensors: list[Tensor] = list(module.parameters(recurse=False))
        tensors += [
            buffer
            for buffer in module.buffers(recurse=False)
            if buffer.dtype is not torch.float32 or has_statistics(module)
        ]
        for tensor in tensors:
            if (
                tensor.dtype in CASTABLE
                and tensor.dtype is not target
                and id(tensor) not in converted
                and id(tensor) not in leave
            ):
                data = _data.__get__(tensor)
                converted[id(tensor)] = Converted(tensor, tensor.dtype, data, tensor.grad)
                place = (*_place(data), target)
                set_data(tensor, in_place.setdefault(place, data.to(target)))
    if converted:
        flatten_rnns(model)
    return list(converted.values())


def _place(data: Tensor) -> tuple:
    """Equal for tensors that are the same numbers in the same memory."""
    if type(data) is not Tensor or data.layout is not torch.strided or not data.data_ptr():
        return (id(data),)
    return data.data_ptr(), data.dtype, data.shape, data.stride()


def float_buffers(model: nn.Module, skip: Callable[[nn.Module], bool]) -> dict[str, Tensor]:
    """The FP32 buffers, by name, that meet half tensors in a half model's forward."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if not skip(module)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype is torch.float32
    }


def half_cannot_hold(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether FP32 `values` would be lost in `dtype`, not merely rounded.

    That is so for finite values that overflow, and for whole numbers that it cannot count.  Waits
    for the device.  Tensors on "meta" have no values to lose.
    """
    if values.is_meta:
        return False
    values = values.detach()
    if values.layout is not torch.strided:
        values = (values.coalesce() if values.is_sparse else values).values()
    large = values[values.isfinite() & (values.abs() >= 2 / torch.finfo(dtype).eps)]
    whole = bool((large == large.round()).all())
    rounded = large.to(dtype).to(values.dtype)
    return bool(rounded.isinf().any()) or (whole and bool((rounded != large).any()))


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data of perhaps another dtype; its gradient goes along."""
    grad, tensor.grad = tensor.grad, None
    exchange_data(tensor, data)
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def flatten_rnns(model: nn.Module) -> None:
    """cuDNN wants the weights of an RNN in one piece; new data is not."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
