"""Optimizers that step in two halves, as sharpness-aware ones (SAM, arXiv 2010.01412) do.

    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.first_step(zero_grad=True)       # climbs to the perturbed weights
    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.second_step(zero_grad=True)      # climbs down and steps

An overflow in either half leaves out the whole step: `first_step` then moves
nothing, `second_step` puts back the weights from before the first, as a half that
raises does.  Their `step(closure)` calls the two halves itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .snapshots import Weights


def has_two_steps(optimizer: Any) -> bool:
    """Whether it has the halves of a step, under the names everybody uses."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


class TwoSteps:
    """The halves of one managed optimizer's step."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed
        self._before = Weights()
        self._overflowed = False

    def first(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Answers for `first_step`."""
        self._managed.before_step()
        self._overflowed = self._managed.take_overflow()
        if self._overflowed:
            return self._zero_grad_if_asked(original, args, kwargs)
        self._before = Weights(self._managed.parameters())
        return self._moved(original, args, kwargs)

    def second(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Answers for `second_step`."""
        self._managed.before_step()
        overflowed = self._managed.take_overflow() or self._overflowed
        self._overflowed = False
        if overflowed:
            self._go_back()
            result = self._zero_grad_if_asked(original, args, kwargs)
        else:
            result = self._moved(original, args, kwargs)
        self._before = Weights()
        self._managed.note_step(overflowed)
        self._managed.after_step()
        return result

    def step(self, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
        """`step(closure)`: the optimizer calls the halves, and the closure between them."""

        def evaluate() -> Any:
            with self._managed.casts_on(), torch.enable_grad():
                return closure()

        try:
            with self._managed.casts_off():
                return original(evaluate, *args, **kwargs)
        except BaseException:
            self._go_back()
            raise

    def _go_back(self) -> None:
        """To the weights from before the first half, if it has moved them."""
        self._before.restore()
        self._before = Weights()
        self._managed.masters.push()

    def _moved(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        try:
            with self._managed.casts_off():
                result = original(*args, **kwargs)
        except BaseException:
            self._go_back()
            raise
        self._managed.masters.push()
        return result

    def _zero_grad_if_asked(self, original: Callable, args: tuple, kwargs: dict) -> None:
        signature = inspect.signature(original)
        if "zero_grad" in signature.parameters:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["zero_grad"]:
                self._managed.optimizer.zero_grad()
