"""Casting under the user's control: decorators, registrations, `disable_casts`, `precision`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..casting import user_functions
from ..casting.policy import Policy, Under
from ..casting.rules import CHOOSERS
from ..casting.tables import Rule
from ..errors import did_you_mean
from ..session.session import cast_state, registry


def half_function(function: Any) -> Any:
    """Decorator: the function's floating arguments are cast to the half type.

    For functions, methods, static and class methods (above or below
    `@staticmethod`) and subclasses of `torch.autograd.Function`: of these the
    inputs of `apply` are cast, and `backward` runs under the casting its
    forward ran under.  Raises `TypeError` for anything else.
    """
    return _decorated(function, Rule.HALF, "ampatch.half_function")


def float_function(function: Any) -> Any:
    """As `half_function`, casting half arguments to FP32."""
    return _decorated(function, Rule.FLOAT, "ampatch.float_function")


def promote_function(function: Any) -> Any:
    """As `half_function`, casting to the widest floating dtype among the arguments."""
    return _decorated(function, Rule.PROMOTE, "ampatch.promote_function")


def _decorated(function: Any, rule: Rule, what: str) -> Any:
    user_functions.check(function, what)
    choose = CHOOSERS[rule]
    if not user_functions.is_function_class(function):
        return user_functions.following(function, choose, cast_state)
    for name, make in user_functions.class_parts(function, choose, cast_state).items():
        setattr(function, name, make(inspect.getattr_static(function, name)))
    return function


def register_half_function(module: Any, name: str | None = None) -> None:
    """As `half_function`, for a function that lives elsewhere.

    `register_half_function(package.module, "function")` or one dotted string
    `"package.module.function"`, which may not be imported yet.  Before or
    after `initialize`.  The module may be a class, the name that of a method or
    of an autograd Function class.  It holds for this session and those to come, until
    `unregister_function`; registered again the function follows the new rule.  Raises `AttributeError` if the module lacks
    the name, `TypeError` for what `half_function` refuses.
    """
    registry.register(module, name, Rule.HALF)


def register_float_function(module: Any, name: str | None = None) -> None:
    """As `register_half_function`, casting half arguments to FP32."""
    registry.register(module, name, Rule.FLOAT)


def register_promote_function(module: Any, name: str | None = None) -> None:
    """As `register_half_function`, casting to the widest dtype among the arguments."""
    registry.register(module, name, Rule.PROMOTE)


def unregister_function(module: Any, name: str | None = None) -> None:
    """Take back what one of the three `register_*_function` did, which `deactivate` leaves standing.

    The function is what it was, at once, and later sessions leave it alone.  It is named as
    there, or in the other of the two ways.  Raises `ValueError` if it is not registered.
    """
    registry.unregister(module, name)


def disable_casts() -> Under:
    """Context manager and decorator: no casting in this thread.

    Like torch's grad mode it belongs to the thread, so that while a generator or task
    is suspended inside the block, what else runs in the thread is under it too.  As a
    decorator of generators and `async` functions it covers only their own steps.  Worker
    threads start without it; forked processes inherit it, spawned ones know of no session.
    """
    return registry.state.under(lambda: None, by_user=True)


def precision(dtype: str) -> Under:
    """Context manager and decorator: every listed function casts to `"float"` or `"half"`.

    For threads and tasks as `disable_casts`.  Raises `ValueError` for another word.  Without casting in force it changes nothing.
    """
    if dtype not in ("float", "half"):
        raise ValueError(
            f'ampatch.precision({dtype!r}): expected "float" or "half".'
            + did_you_mean(str(dtype), ("float", "half"))
        )

    def forced() -> Policy | None:
        policy = registry.state.current()
        if policy is None or not policy.follows_tables:
            return policy
        return policy.forced(torch.float32 if dtype == "float" else policy.half_type)

    return registry.state.under(forced, by_user=True)
