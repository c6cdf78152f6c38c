"""How the user's plain functions, methods and autograd Functions follow a rule.

`function_class_replacements` returns the methods to replace in an autograd Function class.  A
decorator replaces them permanently, `install.py` until the patches are undone.
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
from .patches import MakeReplacement
from .rules import ChooseDtype
from .wrapper import call_cast

GetState = Callable[[], CastState]


def user_function(function: Callable, choose: ChooseDtype, get_state: GetState) -> Callable:
    """Return `function` with its arguments cast to `choose(args, kwargs, policy)`.

    The functions of torch that `function` calls follow their own rules.
    """

    def patched(*args: Any, **kwargs: Any) -> Any:
        policy = get_state().current_policy()
        to = None if policy is None else choose(args, kwargs, policy)
        is_observed = observers and not is_dynamo_compiling()
        called = ObservedCall(function, args, kwargs) if is_observed else function
        if policy is None:
            return called(*args, **kwargs)
        return call_cast(to, called, args, kwargs, policy)

    return patched


def casting_wrapper(function: Any, choose: ChooseDtype, get_state: GetState) -> Any:
    """The replacement of a function or method.  A static or class method remains one."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(casting_wrapper(function.__func__, choose, get_state))
    return functools.wraps(function)(user_function(function, choose, get_state))


def is_function_class(value: Any) -> bool:
    """Whether `value` is a subclass of `torch.autograd.Function`."""
    return isinstance(value, type) and issubclass(value, Function)


def check_can_follow_rule(function: Any, user_call: str) -> None:
    """Raise `TypeError`, which names the user's call, if `function` cannot follow a rule."""
    if isinstance(function, type) and not is_function_class(function):
        raise TypeError(
            f"{user_call}: {function.__name__} is a class. Expected a function, a method or a "
            "subclass of torch.autograd.Function. For an nn.Module class use "
            f'ampatch.initialize(..., overrides={{{function.__name__}: "half"}}) or "float".'
        )
    if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
        raise TypeError(
            f"{user_call}: expected a function, a method or a subclass of torch.autograd.Function, "
            f"got {type_name(function)}."
        )


def function_class_replacements(
    cls: type[Function], choose: ChooseDtype, get_state: GetState
) -> dict[str, MakeReplacement]:
    """`{name: make}` for the methods to replace in an autograd Function class.

    `apply` casts, so `setup_context` and `mark_dirty` get the cast tensors too.  Dynamo ignores a
    replaced `apply` and traces `forward`, so `forward` casts what `apply` has not cast.
    """
    return {
        "apply": lambda original: _casting_apply(original, choose, get_state),
        "forward": lambda original: casting_wrapper(original, choose, get_state),
    }


def _casting_apply(original: classmethod, choose: ChooseDtype, get_state: GetState) -> classmethod:
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return user_function(original.__get__(None, cls), choose, get_state)(*args, **kwargs)

    return classmethod(functools.wraps(original.__get__(None, Function))(apply))
