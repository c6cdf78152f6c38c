"""`optimizer.step(closure)`: the backward pass happens inside the step.

The first evaluation runs before the optimizer's own step, so that an overflow
is known before anything moves.  Optimizers that evaluate again (LBFGS) get the
closure itself; if one of the later evaluations overflows or raises, weights and
optimizer state go back to what they were before the step.  An overflow counts as
one skipped step, whose result is the first loss.  What the forward itself changes
(running statistics, the random state) is not undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .snapshots import WeightsAndState


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
        managed.note_step(True)
        return first
    before = _snapshot(managed)
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
        managed.note_step(True)
        return first
    except BaseException:
        before.restore()
        raise
    finally:
        managed.masters.push()
    managed.note_step(False)
    return result


def _snapshot(managed: Any) -> Any:
    """torch's own, but for LBFGS, call the closure first and never again: no need of a copy."""
    if type(managed.optimizer) in _torchs_own():
        return _Nothing()
    return WeightsAndState(managed.optimizer, managed.parameters())


@functools.cache
def _torchs_own() -> frozenset[type]:
    return frozenset(
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
    )


def _evaluate(managed: Any, closure: Callable) -> Any:
    with managed.casts_on(), torch.enable_grad():
        loss = closure()
    managed.finish_pending()
    managed.take_unscaled()
    managed.update_deferred()
    return loss


class _Nothing:
    """The snapshot for a step that needs none."""

    def restore(self) -> None:
        pass
