"""The state of an optimizer and of optimizers inside it (LARC, SAM, Lookahead)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


def states_of(optimizer: Any) -> list[Any]:
    """The states by parameter of an optimizer and of those in its attributes, in lists too."""
    holders, states = [optimizer], {}
    for holder in holders:  # which grows meanwhile
        state = getattr(holder, "state", None)
        if state is not None:
            states[id(state)] = state
        for value in vars(holder).values():
            holders += [one for one in _items(value) if _is_optimizer(one) and one not in holders]
    return list(states.values())


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def fit_state(optimizer: Any, changed: Collection[int]) -> None:
    """Give the state of parameters (ids) whose dtype has changed their new dtype."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for state in states_of(optimizer) if changed else ():
        for param in params:
            if id(param) in changed and param in state:
                state[param] = _as_dtype(state[param], param.dtype)


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """What an optimizer has for a parameter, in another dtype; steps are counted in their own."""
    if isinstance(value, dict):
        value.update({k: _as_dtype(item, dtype) for k, item in value.items() if k != "step"})
        return value
    if isinstance(value, list):  # LBFGS
        return [_as_dtype(item, dtype) for item in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
