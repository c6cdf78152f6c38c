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

import functools
import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch.nn.parallel
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling, is_dynamo_compiling

from ..torch_private.autocast import devices_on, has_custom_fwd
from ..torch_private.checkpoints import CONTEXTS, index_of_contexts, no_reentry
from ..torch_private.probes import keeps_graph
from .calls import BACKWARD, BLOCK, KEEP, USER, Call, CastState, computes_in, here
from .patches import Replacement

_POLICY = "_ampatch_policy"
_LENT = "_ampatch_lent"
_BESIDE_TORCH = "_ampatch_beside_torch"
"""torch's autocast was on too: `custom_bwd` brings back that, and no casts of ampatch."""
_UNKNOWN = object()
_NOTHING: tuple[Sequence[Any], Any] = (), KEEP


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
        for call in here.stack:
            if call.lending is not None:
                if lent := state.lent():
                    setattr(self, _LENT, (lent, computes_in()))
                break

    return __init__


def _under_noted(original: Callable, state: CastState) -> Callable:
    def apply(self: BackwardCFunction, *args: Any) -> Any:
        policy, (lent, dtype) = getattr(self, _POLICY, _UNKNOWN), getattr(self, _LENT, _NOTHING)
        if policy is None and state.process is None and not (state.per_thread or lent):
            return original(self, *args)
        if policy is _UNKNOWN or is_dynamo_compiling():
            return original(self, *args)
        means_ours = has_custom_fwd(self) and not hasattr(self, _BESIDE_TORCH)
        if policy is state.current() and not means_ours:
            if not lent:
                return original(self, *args)
            policy = KEEP
        taken = _Taken(policy, BACKWARD if means_ours else BLOCK, lent, dtype)
        try:
            return state.within(functools.partial(taken.begin, state), original, self, *args)
        finally:
            if lent and not keeps_graph():
                setattr(self, _LENT, _NOTHING)

    return apply


class _Taken(NamedTuple):
    """What a call takes along to code that runs later.

    The policy and the kind of call that is under it, what is lent, and the dtype it computes in.
    """

    policy: Any
    kind: str
    lent: Sequence[Any] = ()
    computes_in: Any = KEEP

    def begin(self, state: CastState, call: Call) -> None:
        """That code begins.  What begins beside `call` ends with it."""
        call.kind = self.kind
        state.begin(call, None)
        state.set_policy(call, self.policy)
        for index, copies in enumerate(self.lent):
            if index:
                call = Call()
                state.begin(call, None)
            copies.lend_again(call)
        call.computes_in = self.computes_in

    def begin_apart(self, state: CastState, call: Call) -> None:
        """As `begin`, with casts of its own."""
        self.begin(state, call)
        if self.policy is not None:
            self.policy.cache.open_apart(here.stack[-1])


def _taken(state: CastState) -> _Taken:
    """What is in force here; the policy is the user's where the user has set it."""
    policy, (setting, by_user) = state.forward_policy(), state.innermost_setting()
    kind = USER if by_user and policy is setting else BLOCK
    return _Taken(policy, kind, state.lent(), computes_in())


def _along(function: Callable, state: CastState) -> Callable:
    """`function` under the present policy; torch's autocast stays as it is there."""
    taken = _taken(state)._replace(lent=())
    return functools.partial(state.within, functools.partial(taken.begin, state), function)


def _repeatable(function: Callable, state: CastState, taken: _Taken | None = None) -> Callable:
    """`function` under the present policy, with what is lent now and with casts of its own."""
    taken = taken or _taken(state)
    return functools.partial(state.within, functools.partial(taken.begin_apart, state), function)


def _without_reentry(original: Callable, state: CastState) -> Callable:
    position = index_of_contexts(original)

    def generator(function: Callable, *args: Any, **kwargs: Any) -> Generator[None]:
        if is_compiling():
            yield from original(function, *args, **kwargs)
            return
        taken = _taken(state)
        contexts = kwargs[CONTEXTS] if position is None else args[position]

        users: list[Any] = []

        def of_users() -> tuple[Any, Any]:
            forward, recompute = contexts()
            users.append(recompute)
            return forward, nullcontext()

        def in_users(*args: Any, **kwargs: Any) -> Any:
            """The recompute, in the user's context for it, which is under the forward's policy."""
            with users[-1]:
                return function(*args, **kwargs)

        if position is None:
            kwargs[CONTEXTS] = of_users
        else:
            args = (*args[:position], of_users, *args[position + 1 :])
        around = original(_repeatable(in_users, state, taken), *args, **kwargs)
        if taken.policy is None:
            yield from around
            return
        call = Call()
        try:
            state.begin(call, None)
            taken.policy.cache.open_apart(call)
            yield from around
        finally:
            state.remove(call)  # perhaps late: what holds an exception holds the generator

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
