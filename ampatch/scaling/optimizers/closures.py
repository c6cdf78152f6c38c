"""`optimizer.step(closure)`: the optimizer calls the closure, when and as often as it wants.

The closure runs with casting on; after it the gradients are complete.  Whether gradients are
recorded is for the optimizer and the closure to say.  If the gradients of an evaluation
overflow, or an evaluation raises, the optimizer's own step ends there, and weights, state and
the optimizer's own numbers go back to what they were before it.  An overflow counts as one
skipped step, whose result is the first loss.  What the forward itself changes (running
statistics, the random state) is not undone.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...torch_private.optimizers import GLOBAL_PRE_HOOKS, STEP_PRE_HOOKS
from .all_steps import are_others
from .snapshots import Snapshot

if TYPE_CHECKING:
    from ..optimizer import ManagedOptimizer

_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


class Overflowed(BaseException):
    """An evaluation overflowed; ends the optimizer's own step.  No `Exception`, so that a line
    search which catches those does not go on.
    """


class Evaluations:
    """The evaluations of closures within one step."""

    def __init__(self, managed: ManagedOptimizer) -> None:
        self.count = 0
        self._first: Any = None
        self._overflowed = False
        self._managed = managed

    def of(self, closure: Callable) -> Callable:
        """What the optimizer is given in the place of `closure`."""

        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            managed = self._managed
            with managed.owner.casts_on():
                loss = closure(*args, **kwargs)
            managed.gradients.finish()
            if self.count == 0:
                self._first = loss
            self.count += 1
            self.ask()
            return loss

        return evaluate

    def ask(self) -> None:
        """End the optimizer's step if there is an overflow in the gradients gathered so far."""
        self._managed.settle_overflow()
        if self._managed.gradients.take_overflow():
            self._overflowed = True
            raise Overflowed

    def step(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Step with closures that this stands in for; returns what the optimizer returns, or the
        first loss on a skip.

        Casting is off around this, and on again inside the closures.
        """
        optimizer = self._managed.optimizer
        roots = () if evaluates_first(original, optimizer) else (optimizer, optimizer.param_groups)
        try:
            with Snapshot(*roots):
                result = original(*args, **kwargs)
                if not self.count:  # it stepped on the gradients there were
                    self.ask()
                if self._overflowed:
                    raise Overflowed  # the optimizer went on
        except Overflowed:
            if not self._overflowed:
                raise  # seen by a step around this one
            self._managed.note_step(True)
            return self._first
        self._managed.note_step(False)
        return result


def with_closures(
    managed: ManagedOptimizer, args: tuple, kwargs: dict
) -> tuple[Evaluations | None, tuple, dict]:
    """The arguments of `step`, with evaluations in the place of closures; these, or None.

    A closure is a callable in first place or called `closure`, and any function, in
    a dict of options too.
    """
    evaluations = Evaluations(managed)
    found = False

    def replaced(value: Any, is_one: bool) -> Any:
        nonlocal found
        if isinstance(value, _CALLABLES) or (is_one and callable(value)):
            found = True
            return evaluations.of(value)
        if type(value) is dict:
            return {key: replaced(item, key == "closure") for key, item in value.items()}
        return value

    given = tuple(replaced(value, index == 0) for index, value in enumerate(args))
    named = {key: replaced(value, key == "closure") for key, value in kwargs.items()}
    return (evaluations, given, named) if found else (None, args, kwargs)


def evaluates_first(original: Callable, optimizer: Any) -> bool:
    """Whether this bound `step` calls the closure once, before it moves or counts anything.

    So do torch's own, but for LBFGS, while no hook runs in front of them: no need of a copy.
    """
    if type(optimizer) not in torch_optimizers() or getattr(optimizer, STEP_PRE_HOOKS, True):
        return False
    if are_others(GLOBAL_PRE_HOOKS):
        return False
    function = getattr(original, "__func__", original)
    while function is not None:  # around torch's own method only wrappers of torch's own
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@functools.cache
def torch_optimizers() -> frozenset[type]:
    """torch's own optimizers, but for LBFGS, which evaluates closures as often as it wants."""
    return frozenset(
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
    )
