"""Optimizers that step in two halves, as sharpness-aware ones (SAM, arXiv 2010.01412) do.

    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.first_step(zero_grad=True)       # climbs to the perturbed weights
    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.second_step(zero_grad=True)      # climbs down and steps

An overflow in either half leaves out the whole step: `first_step` then moves
nothing, `second_step` puts back the weights from before the first.  Their
`step(closure)` calls the two halves itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def has_two_steps(optimizer: Any) -> bool:
    """Whether it has the halves of a step, under the names everybody uses."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


class TwoSteps:
    """The halves of one managed optimizer's step."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed
        self._before: list[tuple[Tensor, Tensor]] = []  # weights, and their values
        self._overflowed = False

    def make_first(self, original: Callable) -> Callable:
        """What is put in the place of `first_step`."""

        def first(args: tuple, kwargs: dict) -> Any:
            self._overflowed = self._managed.take_overflow()
            if self._overflowed:
                return self._zero_grad_if_asked(original, args, kwargs)
            self._before = [(param, param.detach().clone()) for param in self._managed.parameters()]
            return self._moved(original, args, kwargs)

        return self._around(original, first)

    def make_second(self, original: Callable) -> Callable:
        """What is put in the place of `second_step`."""

        def second(args: tuple, kwargs: dict) -> Any:
            overflowed = self._managed.take_overflow() or self._overflowed
            self._overflowed = False
            if overflowed:
                self._restore()
                result = self._zero_grad_if_asked(original, args, kwargs)
            else:
                result = self._moved(original, args, kwargs)
            self._before = []
            self._managed.after_step(overflowed)
            return result

        return self._around(original, second)

    def step(self, original: Callable, closure: Callable, args: tuple, kwargs: dict) -> Any:
        """`step(closure)`: the optimizer calls the halves, and the closure between them."""

        def evaluate() -> Any:
            with self._managed.casts_on(), torch.enable_grad():
                return closure()

        with self._managed.casts_off():
            return original(evaluate, *args, **kwargs)

    def _restore(self) -> None:
        with torch.no_grad():
            for param, value in self._before:
                param.copy_(value)
        self._managed.masters.push()

    def _around(self, original: Callable, half: Callable[[tuple, dict], Any]) -> Callable:
        @functools.wraps(getattr(original, "__func__", original))
        def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._managed.is_open:
                return original(*args, **kwargs)
            self._managed.before_step()
            return half(args, kwargs)

        return method

    def _moved(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        with self._managed.casts_off():
            result = original(*args, **kwargs)
        self._managed.masters.push()
        return result

    def _zero_grad_if_asked(self, original: Callable, args: tuple, kwargs: dict) -> None:
        signature = inspect.signature(original)
        if "zero_grad" in signature.parameters:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["zero_grad"]:
                self._managed.optimizer.zero_grad()
