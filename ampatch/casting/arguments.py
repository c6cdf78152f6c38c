"""What is among the arguments of a call, in nested lists and tuples too."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def leaves(values: Iterable[Any]) -> list[Any]:
    """The values in nested lists and tuples, in their order."""
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found.extend(leaves(value))
        else:
            found.append(value)
    return found


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among these values, in nested lists and tuples too."""
    return [value for value in leaves(values) if isinstance(value, Tensor)]


def with_items(value: Sequence, items: list) -> Any:
    """The list, tuple or namedtuple `value` with these items; itself where none is another."""
    if all(map(operator.is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]
