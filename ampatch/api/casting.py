"""Casting controlled by the user: decorators, registrations, `disable_casts`, `precision`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..casting import user_functions
from ..casting.calls import KEEP
from ..casting.policy import Policy, PolicyContext
from ..casting.rules import CHOOSERS
from ..casting.tables import Rule
from ..config.overrides import PRECISIONS
from ..config.validation import word
from ..session.session import cast_state, registry
from ..torch_private.autocast import devices_on, half_dtype
from ..types import Function, Owner, Precision


def half_function(function: Function) -> Function:
    """Decorator: casts the function's floating arguments to the half dtype.

    It takes functions, methods, static and class methods (above or below `@staticmethod`)
    and subclasses of `torch.autograd.Function`.  Of these it casts the inputs of `apply`,
    and `backward` runs with the casts of its forward.  Raises `TypeError` for anything else.
    """
    return _decorated(function, Rule.HALF, "ampatch.half_function")


def float_function(function: Function) -> Function:
    """As `half_function`, but casts half arguments to FP32."""
    return _decorated(function, Rule.FLOAT, "ampatch.float_function")


def promote_function(function: Function) -> Function:
    """As `half_function`, but casts to the widest floating dtype among the arguments."""
    return _decorated(function, Rule.PROMOTE, "ampatch.promote_function")


def _decorated(function: Any, rule: Rule, what: str) -> Any:
    user_functions.check(function, what)
    choose = CHOOSERS[rule]
    if not user_functions.is_function_class(function):
        return user_functions.following(function, choose, cast_state)
    for name, make in user_functions.methods(function, choose, cast_state).items():
        setattr(function, name, make(inspect.getattr_static(function, name)))
    return function


def register_half_function(module: Owner, name: str | None = None) -> None:
    """As `half_function`, for a function that lives elsewhere.

    `register_half_function(package.module, "function")`, or one dotted string
    `"package.module.function"`, whose module is imported.  The module may be a class, and the
    name that of a method or of an autograd Function class.  Register before or after `initialize`:
    the rule holds for this session and later ones, until `unregister_function`.  Registered again
    the function follows the new rule.

    Raises:
        AttributeError: the module lacks the name.
        TypeError: `half_function` would refuse the object, or there is no module.
        ValueError: a single string has no dot, or names a module that is not imported.
    """
    registry.register(module, name, Rule.HALF)


def register_float_function(module: Owner, name: str | None = None) -> None:
    """As `register_half_function`, but casts half arguments to FP32."""
    registry.register(module, name, Rule.FLOAT)


def register_promote_function(module: Owner, name: str | None = None) -> None:
    """As `register_half_function`, but casts to the widest dtype among the arguments."""
    registry.register(module, name, Rule.PROMOTE)


def unregister_function(module: Owner, name: str | None = None) -> None:
    """Undo one of the three `register_*_function`, which `deactivate` does not undo.

    The function casts nothing from now on, in this session and in later ones.  It is named
    in either of the two ways of `register_half_function`.  Raises `ValueError` if it is not
    registered.
    """
    registry.unregister(module, name)


def disable_casts() -> PolicyContext:
    """Context manager and decorator: nothing is cast in this thread.

    It holds in managed models that are called inside.  While a session casts, torch's own autocast
    is off inside too, unless an autocast region begins there.
    Like torch's grad mode the block belongs to the thread: while a generator or task is suspended
    inside, other code in the thread runs without casts too.  Decorating a generator or an `async`
    function is a `TypeError`: write the block inside the function.  New threads cast.
    Forked processes inherit the block; spawned processes have no session.
    """
    return PolicyContext(registry.state, lambda: None, "ampatch.disable_casts()")


def precision(dtype: Precision) -> PolicyContext:
    """Context manager and decorator: every listed function casts to `"float"` or `"half"`.

    It belongs to the thread and holds in managed models, as `disable_casts` does.  Without an
    open session that casts it changes nothing.  Raises `ValueError` for any other `dtype`.
    """
    call = f"ampatch.precision({dtype!r})"
    word(call, dtype, PRECISIONS)

    def forced() -> Policy | None:
        policy, _ = registry.state.innermost_setting()
        if policy is None:
            return KEEP
        on = devices_on()
        if on:
            policy = policy.in_dtype(half_dtype(on[-1]))
        return policy.forced(torch.float32 if dtype == "float" else policy.half_dtype)

    return PolicyContext(registry.state, forced, call)
