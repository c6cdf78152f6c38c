"""Weights and optimizer state before a step that may have to be taken back."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .states import states_of


class Weights:
    """Copies of tensors, to go back to."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Write the values back."""
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)


class WeightsAndState:
    """What an optimizer updates and remembers, to go back to."""

    def __init__(self, optimizer: Any, tensors: Iterable[Tensor]) -> None:
        self._weights = Weights(tensors)
        self._states = [
            (state, {key: _cloned(value) for key, value in state.items()})
            for state in states_of(optimizer)
        ]

    def restore(self) -> None:
        """Write the values back."""
        self._weights.restore()
        for state, found in self._states:
            state.clear()
            state.update(found)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cloned(item) for item in value)
    return copy.copy(value)
