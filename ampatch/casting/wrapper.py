"""HOT PATH: what a patched call does.

`replacement(original, choose, state)` returns a plain function (torch.compile sees
through plain functions; it silently unwraps wrapt's proxies) that asks for the active
policy, casts the arguments to the dtype that the rule chooses, and calls the original.
For the usual kinds of arguments the native part casts and calls.

Calls with `out=` are never cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import native
from ..torch_private.torch_functions import is_mode_on
from .calls import PROCESS_POLICY, CastState, thread_calls
from .cast_observers import ObservedCall, observers
from .dynamo_tables import opaque_call
from .handlers import HasHandler, any_has_handler, call_handlers
from .policy import Policy
from .rules import SCALARS, TENSORS, Choose, cast_arguments

if native.part is None:
    _native_call_cast = _UNUSUAL = None
else:
    _native_call_cast, _UNUSUAL = native.part.call_cast, native.part.UNUSUAL


def replacement(
    original: Callable,
    choose: Choose,
    state: CastState,
    run_in_fp32: Callable | None = None,
    casts_nothing_inside: Callable[[Policy], bool] | None = None,
) -> Callable:
    """A plain function that replaces `original` and casts to the dtype that `choose` returns.

    `casts_nothing_inside(policy)`, if any, says whether the function runs without casts inside.
    `run_in_fp32(policy, call, *args, **kwargs)`, if any, makes the calls that no rule casts to
    FP32; its `policy` is None where no policy casts the call.
    """
    opaque = opaque_call(original)

    def patched(*args: Any, **kwargs: Any) -> Any:
        policy, call, is_traced = state.process_policy, original, None
        if state.per_thread:  # as `state.current()`, without the price of a call
            if state.threads_in_modes and not is_dynamo_compiling() and is_mode_on():
                return call_handlers(state, patched, original, args, kwargs)
            thread_policy = thread_calls.policy
            if thread_policy is not PROCESS_POLICY:
                policy, is_traced = thread_policy, is_dynamo_compiling()
                if is_traced:
                    call = opaque
            if observers and not is_dynamo_compiling():
                call = ObservedCall(original, args, kwargs)
        if (
            policy is None
            or ("out" in kwargs and kwargs["out"] is not None)
            or (policy.condition is not None and not policy.condition(args, kwargs))
        ):
            policy = to = None
        elif casts_nothing_inside is not None and casts_nothing_inside(policy):
            if any_has_handler(args, kwargs):
                return call_handlers(state, patched, original, args, kwargs)
            if is_dynamo_compiling():  # `opaque` in the graph would run outside of `casts_off`
                call = original
            if run_in_fp32 is not None:
                call = functools.partial(run_in_fp32, None, call)
            to = choose(args, kwargs, policy)
            # Without casts inside: else the functions that it calls would follow their own rows.
            return state.casts_off(call_cast, to, call, args, kwargs, policy)
        else:
            to = choose(args, kwargs, policy)
        if policy is None or to is None:
            for arg in (*args, *kwargs.values()) if kwargs else args:
                kind = type(arg)
                if not (kind in TENSORS or kind in SCALARS) and any_has_handler(args, kwargs):
                    return call_handlers(state, patched, original, args, kwargs)
            if run_in_fp32 is None:
                return call(*args, **kwargs)
            return run_in_fp32(policy, call, *args, **kwargs)
        if run_in_fp32 is not None and to is not torch.float32:
            call = functools.partial(run_in_fp32, None, call)
        if _native_call_cast is not None and not (
            is_dynamo_compiling() if is_traced is None else is_traced
        ):
            result = _native_call_cast(call, args, kwargs, to, policy.cache, policy.devices)
            if result is not _UNUSUAL:
                return result
        try:
            cast_args, cast_kwargs = cast_arguments(args, kwargs, to, policy)
        except HasHandler:
            return call_handlers(state, patched, original, args, kwargs)
        return call(*cast_args, **cast_kwargs)

    return patched


def call_cast(
    to: torch.dtype | None,
    original: Callable,
    args: Any,
    kwargs: dict,
    policy: Policy,
) -> Any:
    """Call `original` with its arguments cast to `to`, if any.  In C++: `call_cast` of `call.h`."""
    if to is None:
        return original(*args, **kwargs)
    cast_args, cast_kwargs = cast_arguments(args, kwargs, to, policy)
    return original(*cast_args, **cast_kwargs)
