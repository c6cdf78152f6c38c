"""The state of an optimizer, and of the optimizers that it wraps (LARC, SAM, Lookahead)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


def states_of(optimizer: Any) -> list[Any]:
    """`optimizer.state`, and the states of optimizers in the attributes of `optimizer`.

    An attribute may also be a list, tuple or dict of optimizers.
    """
    optimizers = [optimizer]
    states = {}
    for member in optimizers:  # the list grows in this loop
        state = getattr(member, "state", None)
        if state is not None:
            states[id(state)] = state
        for value in vars(member).values():
            optimizers += [
                item for item in _items(value) if _is_optimizer(item) and item not in optimizers
            ]
    return list(states.values())


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


ReplacedValues = list[tuple[Any, Any, Any]]
"""For each replaced value: the container, the key, and the former value."""


def match_state_dtypes(
    optimizer: Any, changed: Collection[int], replaced: ReplacedValues | None = None
) -> None:
    """Cast the state of parameters whose dtype has changed to the new dtype.

    `changed` has the ids of these parameters.  The former values are appended to `replaced`, so
    that `restore_state` can put them back.
    """
    replaced_values: ReplacedValues = [] if replaced is None else replaced
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for state in states_of(optimizer) if changed else ():
        for param in params:
            if id(param) in changed and param in state:
                _cast_state(state, param, param.dtype, replaced_values)


def restore_state(replaced: ReplacedValues) -> None:
    """Undo `match_state_dtypes`."""
    while replaced:
        container, key, value = replaced[-1]
        container[key] = value
        replaced.pop()


def _cast_state(container: Any, key: Any, dtype: torch.dtype, replaced: ReplacedValues) -> None:
    """Cast `container[key]`, the state of a parameter or an item of that state, except "step"."""
    value = container[key]
    if isinstance(value, dict):
        for name in value:
            if name != "step":
                _cast_state(value, name, dtype, replaced)
    elif isinstance(value, list):  # LBFGS
        for index in range(len(value)):
            _cast_state(value, index, dtype, replaced)
    elif isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not dtype:
        replaced.append((container, key, value))
        container[key] = value.to(dtype)
