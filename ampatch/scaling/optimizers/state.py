"""The state of an optimizer and of optimizers inside it, and its way to other parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .parameter_lists import inner_optimizers


def states_of(optimizer: Any) -> list[Any]:
    """The states by parameter of an optimizer and of those inside it (LARC, SAM, Lookahead)."""
    holders = [optimizer, *inner_optimizers(optimizer)]
    states = [getattr(holder, "state", None) for holder in holders]
    return list({id(state): state for state in states if state is not None}.values())


def move_state(optimizer: Any, old: Tensor, new: Tensor) -> None:
    """Give the state of parameter `old` to `new`, in its dtype; they may be the same."""
    for state in states_of(optimizer):
        if old in state:
            moved = state.pop(old)
            if isinstance(moved, dict):
                for key, value in moved.items():
                    if key != "step":
                        moved[key] = _as_dtype(value, new.dtype)
                state[new] = moved
            else:  # of the optimizer's own making; ZeroRedundancyOptimizer has None
                state[new] = _as_dtype(moved, new.dtype)


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A piece of optimizer state, a tensor or a list of them (LBFGS), in another dtype."""
    if isinstance(value, list):
        return [_as_dtype(item, dtype) for item in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def entry_copy(entry: Any) -> Any:
    """What an optimizer has for a parameter; beside these it may have numbers of its own."""
    return dict(entry) if isinstance(entry, dict) else entry


class FoundStates:
    """The states as `initialize` found them, to go back to should it fail.

    `known` is empty once they are forgotten.
    """

    def __init__(self) -> None:
        self.known: list[tuple[Any, dict]] = []

    def note(self, optimizer: Any) -> None:
        """Remember the states as they are now."""
        self.known = [
            (state, {key: entry_copy(entry) for key, entry in state.items()})
            for state in states_of(optimizer)
        ]

    def forget(self) -> None:
        """From now on the state is what training makes of it."""
        self.known = []

    def restore(self) -> None:
        """As they were, to the bit; nothing once they are forgotten."""
        for state, found in self.known:
            state.clear()
            state.update(found)
