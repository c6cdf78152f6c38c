"""How the user's functions follow a rule: plain functions, methods, autograd Functions.

`methods` says what is replaced in an autograd Function class: by a decorator for good, by
`install.py` with undo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

from ..errors import type_name
from .calls import CastState
from .cast_observers import ObservedCall, observers
from .rules import Choose
from .wrapper import call_cast

Make = Callable[[Any], Any]
GetState = Callable[[], CastState]


def user_function(function: Callable, choose: Choose, get_state: GetState) -> Callable:
    """`function` with its arguments cast to `choose(args, kwargs, policy)`, casts on inside."""

    def patched(*args: Any, **kwargs: Any) -> Any:
        policy = get_state().current()
        to = None if policy is None else choose(args, kwargs, policy)
        is_observed = observers and not is_dynamo_compiling()
        call = ObservedCall(function, args, kwargs) if is_observed else function
        if policy is None:
            return call(*args, **kwargs)
        return call_cast(to, call, args, kwargs, policy)

    return patched


def following(function: Any, choose: Choose, get_state: GetState) -> Any:
    """The replacement of `function`, of the same kind: a static method for a static method."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(following(function.__func__, choose, get_state))
    return functools.wraps(function)(user_function(function, choose, get_state))


def is_function_class(value: Any) -> bool:
    """Whether `value` is a subclass of `torch.autograd.Function`."""
    return isinstance(value, type) and issubclass(value, Function)


def check(function: Any, what: str) -> None:
    """Raise `TypeError` for what cannot follow a rule; `what` is the user's call."""
    if isinstance(function, type) and not is_function_class(function):
        raise TypeError(
            f"{what}: {function.__name__} is a class. Expected a function, a method or a "
            "subclass of torch.autograd.Function. For an nn.Module class use "
            f'ampatch.initialize(..., overrides={{{function.__name__}: "half"}}) or "float".'
        )
    if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
        raise TypeError(
            f"{what}: expected a function, a method or a subclass of torch.autograd.Function, "
            f"got {type_name(function)}."
        )


def methods(cls: type[Function], choose: Choose, get_state: GetState) -> dict[str, Make]:
    """`{name: make}` for the methods to replace in an autograd Function class.

    `apply` casts, so that `setup_context` and `mark_dirty` get the casts too.  Dynamo ignores a
    replaced `apply` and traces `forward`, so `forward` casts what `apply` has not cast.
    """
    return {
        "apply": lambda original: _apply(original, choose, get_state),
        "forward": lambda original: following(original, choose, get_state),
    }


def _apply(original: classmethod, choose: Choose, get_state: GetState) -> classmethod:
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return user_function(original.__get__(None, cls), choose, get_state)(*args, **kwargs)

    return classmethod(functools.wraps(original.__get__(None, Function))(apply))
