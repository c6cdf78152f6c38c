"""What runs later, or in another thread, runs under the policy that its call ran under.

*Custom autograd Functions*: each call makes a context, which keeps the policy of its backward.  The
pass may run in another thread, after the forward's `with` block has ended, or after another session
has opened with other rules.  The context also keeps the half copies that were lent where the
Function was called (O2): code that calls modules again in the backward pass (reversible networks,
adjoint solvers) finds the forward's own copies, and may ask for their gradients.  The copies are
let go with the graph's buffers.

*Activation checkpoints*: the recompute makes the casts of the forward.  The functions that
`checkpoint` calls are replaced, not `checkpoint` itself: `checkpoint_wrapper` and transformers hold
it in a `partial`, and Dynamo knows it by its identity.

*Replicas of DataParallel* run in threads of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch.nn.parallel
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling, is_dynamo_compiling

from ..torch_private.autocast import has_custom_fwd
from ..torch_private.checkpoints import CONTEXTS, no_reentry, place_of_contexts
from ..torch_private.probes import keeps_graph
from .cast_state import CastState
from .patches import Replacement
from .policy import Policy
from .stack import BACKWARD, BLOCK, USER, Block
from .torch_autocast import devices_on

_POLICY = "_ampatch_policy"
_LENT = "_ampatch_lent"
_BESIDE_TORCH = "_ampatch_beside_torch"
"""torch's autocast was on too: `custom_bwd` brings back that, and no casts of ampatch."""
_UNKNOWN = object()


def functions(state: CastState) -> list[Replacement]:
    """`(owner, name, make)` for what has to be replaced for custom Functions."""
    return [
        (BackwardCFunction, "__init__", lambda original: _noting(original, state)),
        (BackwardCFunction, "apply", lambda original: _under_noted(original, state)),
    ]


def checkpoints(state: CastState) -> list[Replacement]:
    """`(owner, name, make)` for what has to be replaced for activation checkpoints."""
    owner = torch.utils.checkpoint
    name = no_reentry()
    if name is None:
        return [(owner, "checkpoint", lambda original: _whole(original, state))]
    return [
        (owner, name, lambda original: _without_reentry(original, state)),
        (owner.CheckpointFunction, "forward", lambda original: _reentrant(original, state)),
    ]


def replicas(state: CastState) -> list[Replacement]:
    """`(owner, name, make)` for what has to be replaced for DataParallel."""
    owners = (torch.nn.parallel, importlib.import_module("torch.nn.parallel.data_parallel"))
    return [
        (owner, "parallel_apply", lambda original: _in_threads(original, state)) for owner in owners
    ]


def _noting(original: Callable, state: CastState) -> Callable:
    def __init__(self: BackwardCFunction, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        is_plain = state.process is None and not state.per_thread  # the answer, without two calls
        policy = None if is_plain else state.forward_policy()
        setattr(self, _POLICY, policy)
        if policy is not None and policy.gate is not None and devices_on():
            setattr(self, _BESIDE_TORCH, True)
        if state.thread.lent:
            setattr(self, _LENT, tuple(state.thread.lent))

    return __init__


def _under_noted(original: Callable, state: CastState) -> Callable:
    def apply(self: BackwardCFunction, *args: Any) -> Any:
        if getattr(self, _LENT, ()) and not is_dynamo_compiling():
            with _forwards_copies(self):
                return apply(self, *args)
        policy: Any = getattr(self, _POLICY, _UNKNOWN)
        if policy is None and state.process is None and not state.per_thread:
            return original(self, *args)
        if policy is _UNKNOWN or is_dynamo_compiling():
            return original(self, *args)
        means_ours = has_custom_fwd(self) and not hasattr(self, _BESIDE_TORCH)
        if policy is state.current() and not means_ours:
            return original(self, *args)
        block = Block(state, BACKWARD if means_ours else BLOCK)
        block.enter(policy)
        try:
            return original(self, *args)
        finally:
            block.leave()

    return apply


@contextmanager
def _forwards_copies(context: Any) -> Iterator[None]:
    """The forward's half copies are in place meanwhile, and let go unless the graph is kept."""
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


def _setting(state: CastState) -> tuple[Policy | None, str]:
    """The policy to take along from here, and the kind of block to enter with it later."""
    policy, (setting, by_user) = state.forward_policy(), state.innermost_setting()
    return policy, USER if by_user and policy is setting else BLOCK


def _along(
    function: Callable,
    state: CastState,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable:
    """`function` under the present policy, in `around()`; torch's autocast stays as it is there."""
    policy, kind = _setting(state)

    def along(*args: Any, **kwargs: Any) -> Any:
        block = Block(state, kind)
        block.enter(policy)
        try:
            with around():
                return function(*args, **kwargs)
        finally:
            block.leave()

    return along


def _with_own_copies(function: Callable, state: CastState) -> Callable:
    """`function` with half copies of the weights that are lent now."""
    for lending in state.thread.lent:
        function = lending.again()(function)
    return function


def _repeatable(function: Callable, state: CastState) -> Callable:
    """`function` under the present policy, with what is lent now and with casts of its own."""
    policy = state.forward_policy()
    apart = nullcontext if policy is None else policy.cache.apart
    return _along(_with_own_copies(function, state), state, apart)


class _Recompute:
    """The context of a recompute: the policy of the forward, and in it the user's own context.

    In the forward, too, the user's context is entered under that policy.
    """

    def __init__(self, state: CastState, setting: tuple[Policy | None, str], users: Any) -> None:
        self._state, self._setting, self._users = state, setting, users
        self._entered = ExitStack()

    def __enter__(self) -> None:
        policy, kind = self._setting
        with ExitStack() as stack:
            block = Block(self._state, kind)
            block.enter(policy)
            stack.callback(block.leave)
            if policy is not None:
                stack.enter_context(policy.cache.apart())
            stack.enter_context(self._users)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> Any:
        return self._entered.__exit__(*error)


def _without_reentry(original: Callable, state: CastState) -> Callable:
    place = place_of_contexts(original)

    def generator(function: Callable, *args: Any, **kwargs: Any) -> Generator[None]:
        if is_compiling():
            yield from original(function, *args, **kwargs)
            return
        setting = policy, _ = _setting(state)
        contexts = kwargs[CONTEXTS] if place is None else args[place]

        def in_recompute() -> tuple[Any, Any]:
            forward, recompute = contexts()
            return forward, _Recompute(state, setting, recompute)

        if place is None:
            kwargs[CONTEXTS] = in_recompute
        else:
            args = (*args[:place], in_recompute, *args[place + 1 :])
        around = original(_with_own_copies(function, state), *args, **kwargs)
        if policy is None:
            yield from around
            return
        with policy.cache.apart():
            yield from around

    return generator


def _reentrant(original: Any, state: CastState) -> Any:
    run = original.__func__

    def forward(ctx: Any, function: Callable, *args: Any) -> Any:
        if not is_compiling():
            function = _repeatable(function, state)
        return run(ctx, function, *args)

    return staticmethod(forward)


def _whole(original: Callable, state: CastState) -> Callable:
    def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            function = _repeatable(function, state)
        return original(function, *args, **kwargs)

    return checkpoint


def _in_threads(original: Callable, state: CastState) -> Callable:
    def parallel_apply(modules: Sequence[Callable], *args: Any, **kwargs: Any) -> Any:
        return original([_along(module, state) for module in modules], *args, **kwargs)

    return parallel_apply
