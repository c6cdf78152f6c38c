"""`optimizer.step(closure)`: the closure computes the loss and its gradients.

torch's own optimizers, except LBFGS, evaluate the closure once, before they change a weight.  The
result is the same as if the script called the closure and then `step()`.  Other optimizers may call
the closure several times, also after they have changed weights, and cannot undo these changes if a
later call overflows.  Under a dynamic loss scale, ampatch therefore refuses them, as apex and
`torch.amp.GradScaler` do.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ...errors import AmpatchError

_FUNCTION_TYPES = (types.FunctionType, types.MethodType, functools.partial)


def wrap_closures(
    args: tuple, kwargs: dict, around: Callable[[Callable], Callable]
) -> tuple[list[Callable], tuple, dict]:
    """Return the closures among the arguments of `step`, and the arguments with wrapped closures.

    Each closure is replaced with `around(closure)`.  A closure is a callable that is the first
    argument or is named `closure`, or any function, also inside a dict of options.
    """
    closures: list[Callable] = []

    def wrap(value: Any, is_closure: bool) -> Any:
        if isinstance(value, _FUNCTION_TYPES) or (is_closure and callable(value)):
            closures.append(value)
            return around(value)
        if type(value) is dict:
            return {key: wrap(item, key == "closure") for key, item in value.items()}
        return value

    new_args = tuple(wrap(value, index == 0) for index, value in enumerate(args))
    new_kwargs = {key: wrap(value, key == "closure") for key, value in kwargs.items()}
    return closures, new_args, new_kwargs


def evaluates_closure_first(optimizer: Any) -> bool:
    """Whether this is a torch optimizer that evaluates a closure once, before it steps."""
    module = getattr(type(optimizer).step, "__module__", None) or ""
    return module.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def refuse_closure(optimizer: Any) -> NoReturn:
    """Raise `AmpatchError`, because the optimizer cannot undo a step if a closure overflows."""
    raise AmpatchError(
        f"{type(optimizer).__name__}.step(closure) under a dynamic loss scale: the optimizer calls "
        "the closure itself, so a step that overflows could not be skipped. Nothing was changed. "
        "Use ampatch.initialize(..., dtype=torch.bfloat16), or a static scale, such as "
        "loss_scale=128.0. If the optimizer "
        "evaluates the closure only once, call closure() and then step()."
    )
