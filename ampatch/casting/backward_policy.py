"""Custom autograd Functions: `backward` runs under the policy that their `forward` ran under.

The backward pass may run in another thread, after the forward's `with` block has ended, or
after another session has opened with other rules.  Each call of a Function makes a
context, and that is where its policy is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from .cast_state import CastState
from .patches import Replacement
from .policy import Policy

_POLICY = "_ampatch_policy"
_UNKNOWN = object()


def parts(state: CastState) -> list[Replacement]:
    """`(owner, name, make)` for what has to be replaced."""
    return [
        (BackwardCFunction, "__init__", lambda original: _noting(original, state)),
        (BackwardCFunction, "apply", lambda original: _under_noted(original, state)),
    ]


def _noting(original: Callable, state: CastState) -> Callable:
    def __init__(self: BackwardCFunction, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        setattr(self, _POLICY, state.of_forward())

    return __init__


def _under_noted(original: Callable, state: CastState) -> Callable:
    def apply(self: BackwardCFunction, *args: Any) -> Any:
        policy: Policy | Any | None = getattr(self, _POLICY, _UNKNOWN)
        if policy is _UNKNOWN or is_dynamo_compiling() or policy is state.current():
            return original(self, *args)
        state.push(policy, self)
        try:
            return original(self, *args)
        finally:
            state.pop(self)

    return apply
