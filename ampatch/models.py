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
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

_BATCH_NORMS: tuple[type, ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)
_BATCH_NORM_NAMES = {norm.__name__ for norm in _BATCH_NORMS}
try:
    from torch.nn.modules.batchnorm import _BatchNorm

    _BATCH_NORMS = (_BatchNorm,)  # their common base, and that of other people's
except ImportError:
    pass


def map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `convert` applied to each tensor in it; container types are kept.

    Looks into mappings (`ModelOutput`-like ones too), lists, tuples,
    namedtuples and dataclasses; anything else is returned as it is, and so is
    a container in which nothing changed.  A torch.fx proxy counts as a tensor.
    """
    if isinstance(value, (Tensor, torch.fx.Proxy)):
        return convert(value)
    if isinstance(value, Mapping):
        return _map_mapping(value, convert)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, convert) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, convert)
    return value


def _map_mapping(value: Mapping, convert: Callable) -> Any:
    items = {key: map_tensors(item, convert) for key, item in value.items()}
    if all(items[key] is value[key] for key in items):
        return value
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


def _map_dataclass(value: Any, convert: Callable) -> Any:
    old = {
        f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)
    }
    items = {name: map_tensors(item, convert) for name, item in old.items()}
    if all(items[name] is old[name] for name in items):
        return value
    mapped = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(mapped, name, item)  # it may be frozen
    return mapped


def caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Converts floating tensors to `dtype` and leaves the others alone.

    Where torch.fx is recording, the conversion of whatever a proxy stands for is recorded.
    """

    def convert(tensor: Any) -> Any:
        if isinstance(tensor, torch.fx.Proxy):
            record = tensor.tracer.create_proxy
            return record("call_function", cast_tensors, (tensor, dtype), {})
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return convert


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """`value` with each floating tensor in it converted to `dtype`."""
    if type(value) is Tensor:
        found = value.dtype
        return value.to(dtype) if found is not dtype and found.is_floating_point else value
    return map_tensors(value, caster(dtype))


class Converted(NamedTuple):
    """A parameter or buffer whose dtype was changed, and the values and gradient it had."""

    tensor: Tensor
    dtype: torch.dtype
    original: Tensor
    grad: Tensor | None


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `keep_batchnorm_fp32` is about this module (BatchNorm, SyncBatchNorm, scripted ones)."""
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name in _BATCH_NORM_NAMES
    return isinstance(module, _BATCH_NORMS)


def convert_weights(
    model: nn.Module,
    dtype: torch.dtype,
    skip: Callable[[nn.Module], bool],
    skipped_dtype: torch.dtype = torch.float32,
) -> list[Converted]:
    """Convert floating parameters and buffers in place; returns what was changed, and from what.

    Modules for which `skip` is true go to `skipped_dtype` instead.  Tensors
    shared between modules are converted once.
    """
    converted: dict[int, Converted] = {}
    for module in model.modules():
        target = skipped_dtype if skip(module) else dtype
        for tensor in _own_tensors(module):
            if (
                tensor.is_floating_point()
                and tensor.dtype is not target
                and id(tensor) not in converted
            ):
                converted[id(tensor)] = Converted(tensor, tensor.dtype, tensor.data, tensor.grad)
                set_data(tensor, tensor.data.to(target))
    if converted:
        flatten_rnns(model)
    return list(converted.values())


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data of perhaps another dtype; its gradient goes along."""
    grad, tensor.grad = tensor.grad, None
    tensor.data = data
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def flatten_rnns(model: nn.Module) -> None:
    """cuDNN wants the weights of an RNN in one piece; new data is not."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
