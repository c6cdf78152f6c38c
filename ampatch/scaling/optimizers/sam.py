"""Optimizers that step in two halves, as sharpness-aware ones (SAM, arXiv 2010.01412) do.

    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.first_step(zero_grad=True)       # climbs to the perturbed weights
    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.second_step(zero_grad=True)      # climbs down and steps

An overflow in either half leaves out the whole step: `first_step` then moves
nothing, `second_step` puts back the weights from before the first, as a half that
raises does.  The same where several calls of `first_step` climb.  Inside their own
`step(closure)` the halves are parts of that one step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .snapshots import Snapshot

if TYPE_CHECKING:
    from ..optimizer import ManagedOptimizer


def has_two_steps(optimizer: Any) -> bool:
    """Whether it has the halves of a step, under their usual names."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


class TwoSteps:
    """The halves of one managed optimizer's step."""

    def __init__(self, managed: ManagedOptimizer) -> None:
        self._managed = managed
        self._before = Snapshot()
        self._overflowed = False

    def first(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Answers for `first_step`."""
        if self._is_part():
            return original(*args, **kwargs)
        self._managed.before_step()
        self._overflowed = self._managed.gradients.take_overflow() or self._overflowed
        if not (self._overflowed or self._before.is_held()):
            self._before = Snapshot(tuple(self._managed.parameters()))
        return self._half(original, args, kwargs)

    def second(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Answers for `second_step`."""
        if self._is_part():
            return original(*args, **kwargs)
        self._managed.before_step()
        if self._managed.gradients.take_overflow() or self._overflowed:
            self._overflowed = True
            self._before.restore()
        result = self._half(original, args, kwargs)
        self._before.forget()
        self._managed.note_step(self._overflowed)
        self._overflowed = False
        self._managed.after_step()
        return result

    def _is_part(self) -> bool:
        """Whether `step(closure)` calls it; gradients from before the closure are looked at."""
        evaluations = self._managed.evaluations
        if evaluations is not None and not evaluations.count:
            evaluations.ask()
        return evaluations is not None

    def _half(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        if self._overflowed:
            self._zero_grad_if_asked(original, args, kwargs)
            return None
        with self._managed.owner.casts_off, self._before:
            return original(*args, **kwargs)

    def _zero_grad_if_asked(self, original: Callable, args: tuple, kwargs: dict) -> None:
        signature = inspect.signature(original)
        if "zero_grad" in signature.parameters:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["zero_grad"]:
                self._managed.optimizer.zero_grad()
