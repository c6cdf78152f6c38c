"""Optimizers whose step consists of two calls, such as SAM (arXiv 2010.01412).

    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.first_step(zero_grad=True)       # moves the weights to the perturbed point
    with scale_loss(loss(model(x)), optimizer) as scaled_loss: scaled_loss.backward()
    optimizer.second_step(zero_grad=True)      # moves them back, then updates them

If either block overflows, the step is skipped: `first_step` changes no weight, and `second_step`
restores the weights from before the first `first_step`.  The script may call `first_step` several
times.  If `step(closure)` of the optimizer calls the two methods, ampatch treats them as part of
that step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..gradients import OptimizerGradients
from ..scale_value import is_set


class OptimizerForTwoSteps(Protocol):
    """The part of `ManagedOptimizer` that `TwoSteps` uses."""

    optimizer: Any
    session: Any
    gradients: OptimizerGradients
    parameters: Callable[[], Sequence[Tensor]]
    is_evaluating: bool

    def before_step(self) -> None:
        """Bring gradients and scalers up to date."""

    def record_step(self, skipped: bool | Tensor) -> None:
        """Record whether the step is skipped."""

    def after_step(self) -> None:
        """Finish a step.  Call it after `record_step`."""


def has_two_steps(optimizer: Any) -> bool:
    """Whether an optimizer has `first_step` and `second_step`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))


class TwoSteps:
    """The two calls that make up one step of a managed optimizer."""

    def __init__(self, managed: OptimizerForTwoSteps) -> None:
        self._managed = managed
        # The weights, and their values before the step.
        self._saved_weights: list[tuple[Tensor, Tensor]] = []
        self._has_overflowed = False

    def first_step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Replace the optimizer's `first_step`."""
        if self._managed.is_evaluating:
            return original(*args, **kwargs)
        self._check_overflow()
        if not (self._has_overflowed or self._saved_weights):
            weights = self._managed.parameters()
            self._saved_weights = [(weight, weight.detach().clone()) for weight in weights]
        return self._call_unless_overflow(original, args, kwargs)

    def second_step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Replace the optimizer's `second_step`."""
        if self._managed.is_evaluating:
            return original(*args, **kwargs)
        self._check_overflow()
        if self._has_overflowed:
            with torch.no_grad():
                for weight, value in self._saved_weights:
                    weight.copy_(value)
        self._saved_weights = []
        result = self._call_unless_overflow(original, args, kwargs)
        self._managed.record_step(self._has_overflowed)
        self._has_overflowed = False
        self._managed.after_step()
        return result

    def _check_overflow(self) -> None:
        self._managed.before_step()
        found_inf = self._managed.gradients.take_found_inf()
        self._has_overflowed |= found_inf is not None and is_set(found_inf)

    def _call_unless_overflow(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        if not self._has_overflowed:
            return self._managed.session.call_without_casts(original, *args, **kwargs)
        signature = inspect.signature(original)
        if "zero_grad" in signature.parameters:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["zero_grad"]:
                self._managed.optimizer.zero_grad()
        return None
