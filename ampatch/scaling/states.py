"""Where optimizers keep their state: their own, and those they wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def states_of(optimizer: Any) -> list[Any]:
    """The states by parameter of an optimizer and of those in its attributes.

    A wrapper (LARC, SAM) shares its `param_groups` with the optimizer it holds,
    and that is how the held one is known.
    """
    groups = optimizer.param_groups
    holders = [optimizer]
    for value in vars(optimizer).values():
        held = getattr(value, "param_groups", None)
        if groups and held and held[0] is groups[0]:
            holders.append(value)
    states = [getattr(holder, "state", None) for holder in holders]
    return list({id(state): state for state in states if state is not None}.values())


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A piece of optimizer state, a tensor or a list of them (LBFGS), in another dtype."""
    if isinstance(value, list):
        return [as_dtype(item, dtype) for item in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
