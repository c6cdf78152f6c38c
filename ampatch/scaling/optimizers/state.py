"""The state of an optimizer and of optimizers inside it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Optimizers in the attributes of one, or in lists and dictionaries there; not itself."""
    found: dict[int, Any] = {}
    for value in vars(optimizer).values():
        for one in _items(value):
            if one is not optimizer and _is_optimizer(one) and id(one) not in found:
                found[id(one)] = one
                found.update({id(deeper): deeper for deeper in _inner_optimizers(one)})
    found.pop(id(optimizer), None)
    return list(found.values())


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _states_of(optimizer: Any) -> list[Any]:
    """The states by parameter of an optimizer and of those inside it (LARC, SAM, Lookahead)."""
    holders = [optimizer, *_inner_optimizers(optimizer)]
    states = [getattr(holder, "state", None) for holder in holders]
    return list({id(state): state for state in states if state is not None}.values())


def fit_state(optimizer: Any, changed: Collection[int]) -> None:
    """Give the state of parameters (ids) whose dtype has changed their new dtype."""
    if not changed:
        return
    states = _states_of(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            for state in states if id(param) in changed else ():
                if param in state:
                    state[param] = _as_dtype(state[param], param.dtype)


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """What an optimizer has for a parameter, in another dtype; steps are counted in their own."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "step":
                value[key] = _as_dtype(item, dtype)
        return value
    if isinstance(value, list):  # LBFGS
        return [_as_dtype(item, dtype) for item in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


class FoundStates:
    """The states as `initialize` found them, to go back to should it fail.

    `known` is empty once they are forgotten.
    """

    def __init__(self) -> None:
        self.known: list[tuple[Any, dict]] = []

    def note(self, optimizer: Any) -> None:
        """Remember the states as they are now."""
        self.known = [
            (state, {key: _entry_copy(entry) for key, entry in state.items()})
            for state in _states_of(optimizer)
        ]

    def forget(self) -> None:
        """From now on the state is what training makes of it."""
        self.known = []

    def restore(self) -> None:
        """As they were, to the bit; nothing once they are forgotten."""
        for state, found in self.known:
            state.clear()
            state.update(found)


def _entry_copy(entry: Any) -> Any:
    """What an optimizer has for a parameter; beside these it may have numbers of its own."""
    return dict(entry) if isinstance(entry, dict) else entry
