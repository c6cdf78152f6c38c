"""Casting under the user's control: decorators, registrations, `disable_casts`, `precision`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .casting.casts import CHOOSERS
from .casting.composites import user_function
from .casting.policy import Policy, Under
from .casting.tables import Rule
from .errors import did_you_mean
from .session import registry


def half_function(function: Callable) -> Callable:
    """Decorator: the function's floating arguments are cast to the half type."""
    return _decorated(function, Rule.HALF)


def float_function(function: Callable) -> Callable:
    """Decorator: the function's half arguments are cast to FP32."""
    return _decorated(function, Rule.FLOAT)


def promote_function(function: Callable) -> Callable:
    """Decorator: the function's floating arguments are cast to the widest among them."""
    return _decorated(function, Rule.PROMOTE)


def _decorated(function: Callable, rule: Rule) -> Callable:
    return functools.wraps(function)(user_function(function, CHOOSERS[rule], registry.state))


def register_half_function(module: Any, name: str | None = None) -> None:
    """As `half_function`, for a function that lives elsewhere.

    `register_half_function(package.module, "function")` or one dotted string
    `"package.module.function"`, which may not be imported yet.  Before or
    after `initialize`.  Raises `AttributeError` if the module lacks the name.
    """
    registry.register(module, name, Rule.HALF)


def register_float_function(module: Any, name: str | None = None) -> None:
    """As `register_half_function`, casting half arguments to FP32."""
    registry.register(module, name, Rule.FLOAT)


def register_promote_function(module: Any, name: str | None = None) -> None:
    """As `register_half_function`, casting to the widest dtype among the arguments."""
    registry.register(module, name, Rule.PROMOTE)


def disable_casts() -> Under:
    """Context manager and decorator: no casting in this thread."""
    return registry.state.under(lambda: None, by_user=True)


def precision(dtype: str) -> Under:
    """Context manager and decorator: every listed function casts to `"float"` or `"half"`.

    Raises `ValueError` for another word.  Without casting in force it changes nothing.
    """
    if dtype not in ("float", "half"):
        raise ValueError(
            f'ampatch.precision({dtype!r}): expected "float" or "half".'
            + did_you_mean(str(dtype), ("float", "half"))
        )

    def forced() -> Policy | None:
        policy = registry.state.current()
        if policy is None:
            return None
        return policy.forced(torch.float32 if dtype == "float" else policy.half_type)

    return registry.state.under(forced, by_user=True)
