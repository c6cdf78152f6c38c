"""Tensors in the arguments and outputs of modules."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The floating and complex tensors in a value: in lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict) or hasattr(value, "items"):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
