"""Activation checkpoints: torch's functions for `checkpoint(..., use_reentrant=False)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType

import torch.utils.checkpoint

_NAMES = (
    "_checkpoint_without_reentrant_generator_impl",  # since torch 2.14
    "_checkpoint_without_reentrant_generator",
)
CONTEXT_FN = "context_fn"
"""The argument that makes the context managers of the forward and of the recompute."""


def _takes_context_fn(name: str) -> bool:
    function = getattr(torch.utils.checkpoint, name, None)
    return function is not None and CONTEXT_FN in inspect.signature(function).parameters


_KNOWN_NAMES = frozenset(filter(_takes_context_fn, _NAMES))  # at import, before any replacement


def non_reentrant_name() -> str | None:
    """Return the name of torch's function that runs a checkpoint's forward and keeps its arguments.

    The first argument is the user's function.  Returns None if this torch has no such function.
    """
    called = _called_in_module()
    return next((name for name in _NAMES if name in called and name in _KNOWN_NAMES), None)


def index_of_context_fn(original: Callable) -> int | None:
    """The index of `CONTEXT_FN` among the arguments after the function; None for a keyword."""
    parameters = inspect.signature(original).parameters
    if parameters[CONTEXT_FN].kind is inspect.Parameter.KEYWORD_ONLY:
        return None
    return list(parameters).index(CONTEXT_FN) - 1


def _called_in_module() -> set[str]:
    """The names that functions of `torch.utils.checkpoint` use."""
    functions = {
        name: inspect.unwrap(value)
        for name, value in vars(torch.utils.checkpoint).items()
        if isinstance(value, FunctionType) and name not in _NAMES
    }
    return {name for function in functions.values() for name in function.__code__.co_names}
