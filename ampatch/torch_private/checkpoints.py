"""Activation checkpoints: what `torch.utils.checkpoint.checkpoint` does without reentry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType

import torch.utils.checkpoint

_NAMES = (
    "_checkpoint_without_reentrant_generator_impl",  # since torch 2.14
    "_checkpoint_without_reentrant_generator",
)
CONTEXTS = "context_fn"
"""The argument that makes a forward's context and its recompute's."""


def _takes_contexts(name: str) -> bool:
    function = getattr(torch.utils.checkpoint, name, None)
    return function is not None and CONTEXTS in inspect.signature(function).parameters


_KNOWN = frozenset(filter(_takes_contexts, _NAMES))  # looked up before anything is replaced


def non_reentrant_name() -> str | None:
    """The name of torch's function that runs a checkpoint's forward and keeps its arguments.

    The arguments begin with the user's function.  None: this torch has no function of these names.
    """
    called = _called_in_module()
    return next((name for name in _NAMES if name in called and name in _KNOWN), None)


def index_of_contexts(original: Callable) -> int | None:
    """The index of `CONTEXTS` among the arguments after the function; None: it is a keyword."""
    parameters = inspect.signature(original).parameters
    if parameters[CONTEXTS].kind is inspect.Parameter.KEYWORD_ONLY:
        return None
    return list(parameters).index(CONTEXTS) - 1


def _called_in_module() -> set[str]:
    """The names that functions of `torch.utils.checkpoint` use."""
    functions = {
        name: inspect.unwrap(value)
        for name, value in vars(torch.utils.checkpoint).items()
        if isinstance(value, FunctionType) and name not in _NAMES
    }
    return {name for function in functions.values() for name in function.__code__.co_names}
