"""Casts the tensors in nested values: the inputs and outputs of a half model's forward."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..casting.rules import CASTABLE_DTYPES
from ..torch_private.dtensors import local_of
from ..torch_private.torch_functions import no_torch_function


def map_tensors(value: Any, convert: Callable[[Any], Any], copies: list | None = None) -> Any:
    """`value` with `convert` applied to each tensor in it; container types are kept.

    Looks into mappings (`ModelOutput`-like ones too), lists, tuples, namedtuples and dataclasses;
    any other value is returned unchanged, and so is a container in which nothing changed.
    `copies` gets an entry for each list and mutable mapping that is copied: the original, its copy,
    and the converted items that the copy was made of.
    """
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, (list, tuple)):
        listed = [
            convert(item) if isinstance(item, Tensor) else map_tensors(item, convert, copies)
            for item in value
        ]
        if all(map(operator.is_, listed, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*listed)
        mapped = type(value)(listed)
        if copies is not None and isinstance(value, list):
            copies.append((value, mapped, listed))
        return mapped
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, convert, copies) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        mapped = _with_items(value, items)
        if copies is not None and isinstance(value, MutableMapping):
            copies.append((value, mapped, items))
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, convert, copies)
    return value


def _with_items(value: Any, items: dict) -> Any:
    if type(value) in (dict, OrderedDict):
        return type(value)(items)
    if not isinstance(value, MutableMapping):
        return type(value)(items)
    try:
        mapped = copy.copy(value)
    except TypeError:  # `copy.copy` calls the constructor, which may need more arguments
        mapped = type(value).__new__(type(value))
        vars(mapped).update(vars(value))
    for key, item in items.items():
        mapped[key] = item
    return mapped


def _map_dataclass(value: Any, convert: Callable, copies: list | None) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    before = {name: getattr(value, name) for name in names}
    items = {name: map_tensors(item, convert, copies) for name, item in before.items()}
    if all(items[name] is before[name] for name in names):
        return value
    mapped = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(mapped, name, item)  # the dataclass may be frozen
    return mapped


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors in a nested value, in the order of `map_tensors`."""
    tensors: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, record)
    return tensors


def caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that converts FP32 and half tensors to `dtype` and returns other tensors as is."""

    def convert(tensor: Any) -> Any:
        return tensor.to(dtype) if tensor.dtype in CASTABLE_DTYPES else tensor

    return convert


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """`value` with each FP32 or half tensor in it converted to `dtype`."""
    if type(value) is Tensor:
        current = value.dtype
        return value.to(dtype) if current is not dtype and current in CASTABLE_DTYPES else value
    # By a tensor's id: the tensor and its cast.  The reference keeps the id from being reused.
    casts: dict[int, tuple[Tensor, Tensor]] = {}

    def convert_once(tensor: Tensor) -> Tensor:
        if tensor.dtype is dtype or tensor.dtype not in CASTABLE_DTYPES:
            return tensor
        entry = casts.get(id(tensor))
        if entry is None:
            entry = casts[id(tensor)] = tensor, tensor.to(dtype)
        _, cast = entry
        return cast

    return map_tensors(value, convert_once)


def half_cannot_hold(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether FP32 `values` would be lost in `dtype`, not merely rounded.

    Finite values that overflow are lost, and integers above those that `dtype` counts exactly.
    Synchronizes with the device.  Tensors on "meta" have no values to lose.
    """
    plain = values_of(values)
    if plain is None:
        return False
    large = plain[plain.isfinite() & (plain.abs() >= 2 / torch.finfo(dtype).eps)]
    are_integers = bool((large == large.round()).all())
    rounded = large.to(dtype).to(plain.dtype)
    return bool(rounded.isinf().any()) or (are_integers and bool((rounded != large).any()))


def is_strided(tensor: Tensor) -> bool:
    """Whether the tensor is strided and not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def values_of(tensor: Tensor) -> Tensor | None:
    """The values of a tensor as one detached plain tensor.

    None if it has no values (a meta tensor or a wrapper subclass).  Of a sparse or nested tensor
    these are its `values()`, of a DTensor the values of the local tensor.  A subclass is viewed as
    a plain tensor.
    """
    if type(tensor) is not Tensor:
        with no_torch_function():
            return _plain_values(tensor)
    return _plain_values(tensor)


def _plain_values(tensor: Tensor) -> Tensor | None:
    if tensor.is_meta:
        return None
    tensor = local_of(tensor)
    if not is_strided(tensor):
        tensor = (tensor.detach().coalesce() if tensor.is_sparse else tensor.detach()).values()
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None  # a wrapper of other tensors, or one without values
    return tensor.detach().as_subclass(Tensor)
