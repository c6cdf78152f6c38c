"""Casting controlled by the user: decorators, registrations, `disable_casts`, `precision`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..casting import user_functions
from ..casting.calls import INHERIT
from ..casting.policy import Policy, PolicyContext
from ..casting.rules import CHOOSERS
from ..casting.tables import Rule
from ..config.overrides import PRECISIONS
from ..config.validation import known_word
from ..session.session import get_cast_state, registry
from ..torch_private.autocast import devices_with_torch_autocast, torch_autocast_dtype
from ..types import Function, Owner, Precision


def half_function(function: Function) -> Function:
    """Decorator: casts the floating arguments of a function to the half dtype.

    Works on functions, methods, static and class methods (above or below `@staticmethod`), and
    subclasses of `torch.autograd.Function`: it casts the inputs of `apply`, and `backward` uses the
    same casts as the forward.  Raises `TypeError` for anything else.
    """
    return _decorate_with_rule(function, Rule.HALF, "ampatch.half_function")


def float_function(function: Function) -> Function:
    """Like `half_function`, but casts half arguments to FP32."""
    return _decorate_with_rule(function, Rule.FLOAT, "ampatch.float_function")


def promote_function(function: Function) -> Function:
    """Like `half_function`, but casts to the widest floating dtype among the arguments."""
    return _decorate_with_rule(function, Rule.PROMOTE, "ampatch.promote_function")


def _decorate_with_rule(function: Any, rule: Rule, user_call: str) -> Any:
    user_functions.check_can_follow_rule(function, user_call)
    choose = CHOOSERS[rule]
    if not user_functions.is_function_class(function):
        return user_functions.casting_wrapper(function, choose, get_cast_state)
    replacements = user_functions.function_class_replacements(function, choose, get_cast_state)
    for name, make in replacements.items():
        setattr(function, name, make(inspect.getattr_static(function, name)))
    return function


def register_half_function(module: Owner, name: str | None = None) -> None:
    """Like `half_function`, for a function of another module.

        ampatch.register_half_function(functional, "linear")

    Or pass one dotted string, `"package.module.function"`, whose module is then imported.  `module`
    may be a class, and `name` a method or an autograd Function class.  Register before or after
    `initialize`: the rule holds until `unregister_function`, in later sessions too.  A second
    registration replaces the rule.

    Raises:
        AttributeError: the module lacks the name.
        TypeError: `half_function` accepts no such object, or `module` is neither module nor class.
        ValueError: a single string has no dot, or its module cannot be imported.
    """
    registry.register(module, name, Rule.HALF)


def register_float_function(module: Owner, name: str | None = None) -> None:
    """Like `register_half_function`, but casts half arguments to FP32."""
    registry.register(module, name, Rule.FLOAT)


def register_promote_function(module: Owner, name: str | None = None) -> None:
    """Like `register_half_function`, but casts to the widest dtype among the arguments."""
    registry.register(module, name, Rule.PROMOTE)


def unregister_function(module: Owner, name: str | None = None) -> None:
    """Undo a `register_*_function`.  (`deactivate` keeps registrations.)

    Name the function as in `register_half_function`.  It is no longer cast, in this session and in
    later sessions.  Raises `ValueError` if it is not registered.
    """
    registry.unregister(module, name)


def disable_casts() -> PolicyContext:
    """Context manager and decorator: nothing is cast in this thread.

        with ampatch.disable_casts():
            loss = criterion(model(inputs), targets)

    It applies to managed models that are called inside.  torch's own autocast is off inside too,
    unless a `torch.autocast` block begins inside.  The block belongs to its thread, like torch's
    grad mode.  So if a generator or a task is suspended inside the block, other code of this thread
    runs without casts too.  New threads cast; forked processes inherit the block.  Decorating a
    generator or an `async` function raises `TypeError`: write the block inside the function.
    """
    return PolicyContext(registry.state, lambda: None, "ampatch.disable_casts()")


def precision(dtype: Precision) -> PolicyContext:
    """Context manager and decorator: all functions of the op tables cast to one dtype.

        with ampatch.precision("float"):
            loss = criterion(model(inputs), targets)

    `dtype` is `"float"` (FP32) or `"half"`.  Like `disable_casts`, the block belongs to its thread
    and applies to managed models that are called inside.  It does nothing if no open session casts.
    Raises `ValueError` for any other `dtype`.
    """
    user_call = f"ampatch.precision({dtype!r})"
    known_word(user_call, dtype, PRECISIONS)

    def forced() -> Policy | None:
        policy, _ = registry.state.innermost_policy()
        if policy is None:
            return INHERIT
        autocast_devices = devices_with_torch_autocast()
        if autocast_devices:
            policy = policy.with_half_dtype(torch_autocast_dtype(autocast_devices[-1]))
        return policy.casting_all_to(torch.float32 if dtype == "float" else policy.half_dtype)

    return PolicyContext(registry.state, forced, user_call)
