"""Runs later code, and code in other threads, under the policy of the call that it belongs to.

*Custom autograd Functions*: each call makes a context (`ctx`), which keeps the policy for its
backward.  The backward pass may run in another thread, after the forward's `with` block has ended,
or after another session has opened with other rules.  At O2, the context also keeps the half copies
of the forward.  Code that calls modules again in the backward pass (reversible networks, adjoint
solvers) computes with these copies, and may ask for their gradients.  The context drops the copies
when autograd frees the graph's buffers.

*Activation checkpoints*: the recompute casts like the forward.  The functions that
`checkpoint` calls are replaced, not `checkpoint` itself: `checkpoint_wrapper` and transformers hold
`checkpoint` in a `partial`, and Dynamo knows it by its identity.

*Replicas of DataParallel* run in threads of their own, under the policy of the call that starts
them.
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

from ..torch_private.autocast import devices_with_torch_autocast, has_custom_fwd
from ..torch_private.checkpoints import CONTEXT_FN, index_of_context_fn, non_reentrant_name
from ..torch_private.probes import keeps_graph
from .calls import (
    BACKWARD,
    INHERIT,
    INTERNAL,
    USER_BLOCK,
    Call,
    CastState,
    current_compute_dtype,
    thread_calls,
)
from .patches import Patch

_POLICY_ATTRIBUTE = "_ampatch_policy"
_SWAPS_ATTRIBUTE = "_ampatch_swaps"
_TORCH_CASTS_ATTRIBUTE = "_ampatch_torch_casts_too"
"""Set if torch's autocast was enabled too: then `custom_bwd` restores torch's casts."""
_NOT_SAVED = object()
_NO_SWAPS_OR_DTYPE: tuple[Sequence[Any], Any] = (), INHERIT


def function_patches(state: CastState) -> list[Patch]:
    """The patches for custom autograd Functions."""
    return [
        (BackwardCFunction, "__init__", lambda original: _make_saving_init(original, state)),
        (
            BackwardCFunction,
            "apply",
            lambda original: _make_restoring_apply(original, state),
        ),
    ]


def checkpoint_patches(state: CastState) -> list[Patch]:
    """The patches for activation checkpoints."""
    owner = torch.utils.checkpoint
    name = non_reentrant_name()
    if name is None:
        return [(owner, "checkpoint", lambda original: _make_checkpoint(original, state))]
    return [
        (owner, name, lambda original: _make_non_reentrant(original, state)),
        (owner.CheckpointFunction, "forward", lambda original: _make_reentrant(original, state)),
    ]


def replica_patches(state: CastState) -> list[Patch]:
    """The patches for DataParallel."""
    owners = (torch.nn.parallel, importlib.import_module("torch.nn.parallel.data_parallel"))
    return [
        (owner, "parallel_apply", lambda original: _make_parallel_apply(original, state))
        for owner in owners
    ]


def _make_saving_init(original: Callable, state: CastState) -> Callable:
    def __init__(self: BackwardCFunction, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        may_cast = state.process_policy is not None or state.has_thread_policies
        policy = state.current_policy_in_forwards() if may_cast else None  # the `if` is for speed
        setattr(self, _POLICY_ATTRIBUTE, policy)
        if policy is not None and policy.condition is not None and devices_with_torch_autocast():
            setattr(self, _TORCH_CASTS_ATTRIBUTE, True)
        for call in thread_calls.stack:
            if call.swap is not None:
                if swaps := state.swaps():
                    setattr(self, _SWAPS_ATTRIBUTE, (swaps, current_compute_dtype()))
                break

    return __init__


def _make_restoring_apply(original: Callable, state: CastState) -> Callable:
    def apply(self: BackwardCFunction, *args: Any) -> Any:
        policy = getattr(self, _POLICY_ATTRIBUTE, _NOT_SAVED)
        swaps, dtype = getattr(self, _SWAPS_ATTRIBUTE, _NO_SWAPS_OR_DTYPE)
        may_cast = state.process_policy is not None or state.has_thread_policies
        if policy is None and not (may_cast or swaps):
            return original(self, *args)
        if policy is _NOT_SAVED or is_dynamo_compiling():
            return original(self, *args)
        restores_casts = has_custom_fwd(self) and not hasattr(self, _TORCH_CASTS_ATTRIBUTE)
        if policy is state.current_policy() and not restores_casts:
            if not swaps:
                return original(self, *args)
            policy = INHERIT
        thread_state = _ThreadState(policy, BACKWARD if restores_casts else INTERNAL, swaps, dtype)
        try:
            return state.run_in_call(
                functools.partial(thread_state.enter, state), original, self, *args
            )
        finally:
            if swaps and not keeps_graph():
                setattr(self, _SWAPS_ATTRIBUTE, _NO_SWAPS_OR_DTYPE)

    return apply


class _ThreadState(NamedTuple):
    """The policy and the swaps of a thread, for code that runs later or in another thread.

    `kind`: the kind of the new call in which that code runs.
    """

    policy: Any
    kind: str
    swaps: Sequence[Any] = ()
    compute_dtype: Any = INHERIT

    def enter(self, state: CastState, call: Call) -> None:
        """Enter `call`, and inside it a call for each further swap; all exit with `call`."""
        call.kind = self.kind
        state.enter(call, None)
        state.set_policy(call, self.policy)
        for index, swap in enumerate(self.swaps):
            if index:
                call = Call()
                state.enter(call, None)
            swap.swap_in_again(call)
        call.compute_dtype = self.compute_dtype

    def enter_recompute(self, state: CastState, call: Call) -> None:
        """Like `enter`, but the call gets half copies of its own."""
        self.enter(state, call)
        if self.policy is not None:
            self.policy.cache.open_for_checkpoint(thread_calls.stack[-1])


def _save_thread_state(state: CastState) -> _ThreadState:
    """Return this thread's state.  Its `kind` is USER_BLOCK if the user set the policy."""
    policy = state.current_policy_in_forwards()
    innermost_policy, by_user = state.innermost_policy()
    kind = USER_BLOCK if by_user and policy is innermost_policy else INTERNAL
    return _ThreadState(policy, kind, state.swaps(), current_compute_dtype())


def _with_current_policy(function: Callable, state: CastState) -> Callable:
    """Have `function` run under the policy that is active now; torch's autocast is not changed."""
    thread_state = _save_thread_state(state)._replace(swaps=())
    return functools.partial(
        state.run_in_call, functools.partial(thread_state.enter, state), function
    )


def _with_recompute_state(
    function: Callable, state: CastState, thread_state: _ThreadState | None = None
) -> Callable:
    """Have `function` run under `thread_state` (default: this thread's) with new half copies."""
    enter = functools.partial((thread_state or _save_thread_state(state)).enter_recompute, state)
    return functools.partial(state.run_in_call, enter, function)


def _make_non_reentrant(original: Callable, state: CastState) -> Callable:
    position = index_of_context_fn(original)

    def generator(function: Callable, *args: Any, **kwargs: Any) -> Generator[None]:
        if is_compiling():
            yield from original(function, *args, **kwargs)
            return
        thread_state = _save_thread_state(state)
        make_contexts = kwargs[CONTEXT_FN] if position is None else args[position]
        recompute_contexts: list[Any] = []

        def make_forward_context() -> tuple[Any, Any]:
            forward, recompute = make_contexts()
            recompute_contexts.append(recompute)
            return forward, nullcontext()

        def in_user_context(*args: Any, **kwargs: Any) -> Any:
            """Recompute inside the user's context manager, both under the forward's policy."""
            with recompute_contexts[-1]:
                return function(*args, **kwargs)

        if position is None:
            kwargs[CONTEXT_FN] = make_forward_context
        else:
            args = (*args[:position], make_forward_context, *args[position + 1 :])
        checkpoint = original(
            _with_recompute_state(in_user_context, state, thread_state), *args, **kwargs
        )
        if thread_state.policy is None:
            yield from checkpoint
            return
        call = Call()
        try:
            state.enter(call, None)
            thread_state.policy.cache.open_for_checkpoint(call)
            yield from checkpoint
        finally:
            state.exit_out_of_order(call)  # may be late: a traceback keeps the generator alive

    return generator


def _make_reentrant(original: Any, state: CastState) -> Any:
    original_forward = original.__func__

    def forward(ctx: Any, function: Callable, *args: Any) -> Any:
        if not is_compiling():
            function = _with_recompute_state(function, state)
        return original_forward(ctx, function, *args)

    return staticmethod(forward)


def _make_checkpoint(original: Callable, state: CastState) -> Callable:
    def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            function = _with_recompute_state(function, state)
        return original(function, *args, **kwargs)

    return checkpoint


def _make_parallel_apply(original: Callable, state: CastState) -> Callable:
    def parallel_apply(modules: Sequence[Callable], *args: Any, **kwargs: Any) -> Any:
        calls = [_with_current_policy(module, state) for module in modules]
        return original(calls, *args, **kwargs)

    return parallel_apply
