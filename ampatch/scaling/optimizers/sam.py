"""Optimizers that step in two halves, as sharpness-aware ones (SAM, arXiv 2010.01412) do.

    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.first_step(zero_grad=True)       # climbs to the perturbed weights
    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.second_step(zero_grad=True)      # climbs down and steps

An overflow in either half leaves out the whole step: `first_step` then moves
nothing, `second_step` puts back the weights from before the first, as a half that
raises does.  Inside their own `step(closure)` the halves are parts of that one step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .closures import Evaluations
from .snapshots import Weights

if TYPE_CHECKING:
    from ..optimizer import ManagedOptimizer


def has_two_steps(optimizer: Any) -> bool:
    """Whether it has the halves of a step, under their usual names."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


class TwoSteps:
    """The halves of one managed optimizer's step."""

    def __init__(self, managed: ManagedOptimizer) -> None:
        self._managed = managed
        self._before = Weights()
        self._overflowed = False
        self._inside: Evaluations | None = None  # of the `step(closure)` that is running

    def first(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Answers for `first_step`."""
        if self._inside is not None:
            return self._part(self._inside, original, args, kwargs)
        self._managed.before_step()
        self._overflowed = self._managed.gradients.take_overflow()
        if self._overflowed:
            self._zero_grad_if_asked(original, args, kwargs)
            return None
        self._before = Weights(self._managed.parameters())
        return self._moved(original, args, kwargs)

    def second(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Answers for `second_step`."""
        if self._inside is not None:
            return self._part(self._inside, original, args, kwargs)
        self._managed.before_step()
        overflowed = self._managed.gradients.take_overflow() or self._overflowed
        self._overflowed = False
        result = None
        if overflowed:
            self._go_back()
            self._zero_grad_if_asked(original, args, kwargs)
        else:
            result = self._moved(original, args, kwargs)
        self._before = Weights()
        self._managed.note_step(overflowed)
        self._managed.after_step()
        return result

    @contextlib.contextmanager
    def inside_step(self, evaluations: Evaluations) -> Iterator[None]:
        """While the optimizer's own `step(closure)` runs."""
        self._inside = evaluations
        try:
            yield
        finally:
            self._inside = None

    def _part(self, evaluations: Evaluations, original: Callable, args: tuple, kwargs: dict) -> Any:
        """A half that `step(closure)` calls; gradients from before the closure are looked at."""
        if not evaluations.count:
            evaluations.ask()
        return original(*args, **kwargs)

    def _go_back(self) -> None:
        """To the weights from before the first half, if it has moved them."""
        self._before.restore()
        self._before = Weights()

    def _moved(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        try:
            with self._managed.owner.casts_off:
                return original(*args, **kwargs)
        except BaseException:
            self._go_back()
            raise

    def _zero_grad_if_asked(self, original: Callable, args: tuple, kwargs: dict) -> None:
        signature = inspect.signature(original)
        if "zero_grad" in signature.parameters:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["zero_grad"]:
                self._managed.optimizer.zero_grad()
