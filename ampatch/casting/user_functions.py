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
from .wrapper import call_in

Make = Callable[[Any], Any]
Ask = Callable[[], CastState]


def user_function(function: Callable, choose: Choose, ask: Ask) -> Callable:
    """`function` with its arguments cast to `choose(args, kwargs, policy)`, casts on inside."""

    def patched(*args: Any, **kwargs: Any) -> Any:
        policy = ask().current()
        to = None if policy is None else choose(args, kwargs, policy)
        is_seen = observers and not is_dynamo_compiling()
        call = ObservedCall(function, args, kwargs) if is_seen else function
        return call(*args, **kwargs) if policy is None else call_in(to, call, args, kwargs, policy)

    return patched


def following(function: Any, choose: Choose, ask: Ask) -> Any:
    """The replacement of `function`, of the same kind: a static method for a static method."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(following(function.__func__, choose, ask))
    return functools.wraps(function)(user_function(function, choose, ask))


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


def methods(cls: type[Function], choose: Choose, ask: Ask) -> dict[str, Make]:
    """`{name: make}` for the methods to replace in an autograd Function class.

    `apply` casts, so that `setup_context` and `mark_dirty` get the casts too.  Dynamo ignores a
    replaced `apply` and traces `forward`, so `forward` casts what `apply` has not cast.
    """
    return {
        "apply": lambda original: _apply(original, choose, ask),
        "forward": lambda original: following(original, choose, ask),
    }


def _apply(original: classmethod, choose: Choose, ask: Ask) -> classmethod:
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return user_function(original.__get__(None, cls), choose, ask)(*args, **kwargs)

    return classmethod(functools.wraps(original.__get__(None, Function))(apply))
