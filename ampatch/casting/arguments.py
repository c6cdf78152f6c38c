"""The arguments of a call, in nested lists and tuples too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def leaves(values: Iterable[Any]) -> list[Any]:
    """The values, with nested lists and tuples flattened."""
    flat = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat.extend(leaves(value))
        else:
            flat.append(value)
    return flat


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among these values, in nested lists and tuples too."""
    return [value for value in leaves(values) if isinstance(value, Tensor)]
