"""`optimizer.step(closure)`: the backward pass happens inside the step.

The first evaluation runs before the optimizer's own step, so that an overflow
is known before anything moves.  Optimizers that evaluate again (LBFGS) get the
closure itself; if one of the later evaluations overflows, weights and optimizer
state go back to what they were before the step, and the step counts as skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .states import states_of


class _Overflow(Exception):
    """A later evaluation overflowed; ends the optimizer's own step."""


def step_with_closure(
    managed: Any, original: Callable, closure: Callable, args: tuple, kwargs: dict
) -> Any:
    """Step with a closure; returns what the optimizer returns, or the first loss on a skip.

    Casting is off around this, and on again inside the closure.
    """
    first = _evaluate(managed, closure)
    if managed.take_overflow():
        managed.note_skip(True)
        return first
    before = _Snapshot(managed)
    evaluations = 0

    def evaluate() -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 1:
            return first
        managed.masters.push()
        loss = _evaluate(managed, closure)
        if managed.take_overflow():
            raise _Overflow
        return loss

    try:
        result = original(evaluate, *args, **kwargs)
    except _Overflow:
        before.restore()
        managed.note_skip(True)
        return first
    managed.note_skip(False)
    managed.masters.push()
    return result


def _evaluate(managed: Any, closure: Callable) -> Any:
    with managed.casts_on(), torch.enable_grad():
        loss = closure()
    managed.finish_pending()
    managed.take_unscaled()
    managed.update_deferred()
    return loss


class _Snapshot:
    """Weights and optimizer state before a step, to go back to."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed
        self._params = [(param, param.detach().clone()) for param in managed.parameters()]
        self._states = [
            (state, {key: _cloned(value) for key, value in state.items()})
            for state in states_of(managed.optimizer)
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for param, value in self._params:
                param.copy_(value)
        for state, found in self._states:
            state.clear()
            state.update(found)
        self._managed.masters.push()


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cloned(item) for item in value)
    return copy.copy(value)
