"""Custom autograd Functions: `backward` runs under the policy that their `forward` ran under.

The backward pass may run in another thread, after the forward's `with` block has ended, or
after another session has opened with other rules.  Each call of a Function makes a
context, and that is where its policy is kept.

So are the half copies that were lent where the Function was called (O2): what calls modules again
in the backward pass (reversible networks, adjoint solvers) finds the forward's own copies, whose
gradients it may ask for.  They are let go with the graph's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from ..torch_private.probes import keeps_graph
from .cast_state import CastState
from .patches import Replacement
from .policy import Policy

_POLICY = "_ampatch_policy"
_LENT = "_ampatch_lent"
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
        is_plain = state.process is None and not state.per_thread  # the answer, without two calls
        setattr(self, _POLICY, None if is_plain else state.of_forward())
        if state.thread.lent:
            setattr(self, _LENT, tuple(state.thread.lent))

    return __init__


def _under_noted(original: Callable, state: CastState) -> Callable:
    def apply(self: BackwardCFunction, *args: Any) -> Any:
        if getattr(self, _LENT, ()) and not is_dynamo_compiling():
            with _forwards_copies(self):
                return apply(self, *args)
        policy: Policy | Any | None = getattr(self, _POLICY, _UNKNOWN)
        if policy is None and state.process is None and not state.per_thread:
            return original(self, *args)
        if policy is _UNKNOWN or is_dynamo_compiling() or policy is state.current():
            return original(self, *args)
        state.push(policy, self)
        try:
            return original(self, *args)
        finally:
            state.pop(self)

    return apply


@contextmanager
def _forwards_copies(context: Any) -> Iterator[None]:
    """They are in place meanwhile; they are let go unless the graph is kept."""
    lent = getattr(context, _LENT)
    setattr(context, _LENT, ())
    try:
        with ExitStack() as stack:
            for lending in lent:
                stack.enter_context(lending.again())
            yield
    finally:
        if keeps_graph():
            setattr(context, _LENT, lent)
