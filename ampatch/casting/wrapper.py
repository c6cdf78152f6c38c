"""HOT PATH: what a patched call does.

`replacement(original, choose, state)` returns a plain function (torch.compile sees
through plain functions; it silently unwraps wrapt's proxies) that asks for the active
policy, casts the arguments to the dtype that the rule chooses, and calls the original.
For the usual kinds of arguments, the native part casts and calls.

Calls with `out=` are never cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import native
from ..torch_private.torch_functions import is_torch_function_mode_enabled
from .calls import FOLLOWS_PROCESS, CastState, thread_calls
from .cast_observers import ObservedCall, observers
from .dynamo_patches import opaque_call
from .handlers import HasHandler, any_has_handler, call_handlers
from .policy import Policy
from .rules import NON_TENSOR_TYPES, PLAIN_TENSOR_TYPES, ChooseDtype, cast_arguments

if native.part is None:
    _native_call_cast = _NOT_HANDLED = None
else:
    _native_call_cast, _NOT_HANDLED = native.part.call_cast, native.part.NOT_HANDLED


def replacement(
    original: Callable,
    choose: ChooseDtype,
    state: CastState,
    call_original: Callable | None = None,
    disables_casts_inside: Callable[[Policy], bool] | None = None,
) -> Callable:
    """A plain function that replaces `original` and casts to the dtype that `choose` returns.

    `disables_casts_inside(policy)` returns whether casts are off while the original runs.

    `call_original(policy, function, *args, **kwargs)` calls the original.  It is used unless casts
    stay on inside and the rule casts the arguments to FP32.  Its `policy` is the active policy if
    casts stay on inside and the rule chose no dtype, else None.  It is also None if no rule was
    asked: no policy is active, its condition is False, or the call has `out=`.
    """
    opaque = opaque_call(original)

    def patched(*args: Any, **kwargs: Any) -> Any:
        policy, function = state.process_policy, original
        is_dynamo_traced = None  # None: not asked yet
        if state.has_thread_policies:  # inlined `state.current_policy()`
            if (
                state.threads_in_function_modes
                and not is_dynamo_compiling()
                and is_torch_function_mode_enabled()
            ):
                return call_handlers(state, patched, original, args, kwargs)
            thread_policy = thread_calls.policy
            if thread_policy is not FOLLOWS_PROCESS:
                policy, is_dynamo_traced = thread_policy, is_dynamo_compiling()
                if is_dynamo_traced:
                    function = opaque
            if observers and not is_dynamo_compiling():
                function = ObservedCall(original, args, kwargs)
        if (
            policy is None
            or ("out" in kwargs and kwargs["out"] is not None)
            or (policy.condition is not None and not policy.condition(args, kwargs))
        ):
            policy = target_dtype = None
        elif disables_casts_inside is not None and disables_casts_inside(policy):
            if any_has_handler(args, kwargs):
                return call_handlers(state, patched, original, args, kwargs)
            if is_dynamo_compiling():  # in a graph `opaque` would run outside `call_without_casts`
                function = original
            if call_original is not None:
                function = functools.partial(call_original, None, function)
            target_dtype = choose(args, kwargs, policy)
            # With casts on, the functions that the original calls would follow their own rows.
            return state.call_without_casts(call_cast, target_dtype, function, args, kwargs, policy)
        else:
            target_dtype = choose(args, kwargs, policy)
        if policy is None or target_dtype is None:
            for arg in (*args, *kwargs.values()) if kwargs else args:
                cls = type(arg)
                is_usual = cls in PLAIN_TENSOR_TYPES or cls in NON_TENSOR_TYPES
                if not is_usual and any_has_handler(args, kwargs):
                    return call_handlers(state, patched, original, args, kwargs)
            if call_original is None:
                return function(*args, **kwargs)
            return call_original(policy, function, *args, **kwargs)
        if call_original is not None and target_dtype is not torch.float32:
            function = functools.partial(call_original, None, function)
        if _native_call_cast is not None and not (
            is_dynamo_compiling() if is_dynamo_traced is None else is_dynamo_traced
        ):
            result = _native_call_cast(
                function, args, kwargs, target_dtype, policy.cache, policy.devices
            )
            if result is not _NOT_HANDLED:
                return result
        try:
            cast_args, cast_kwargs = cast_arguments(args, kwargs, target_dtype, policy)
        except HasHandler:
            return call_handlers(state, patched, original, args, kwargs)
        return function(*cast_args, **cast_kwargs)

    return patched


def call_cast(
    target_dtype: torch.dtype | None,
    function: Callable,
    args: Any,
    kwargs: dict,
    policy: Policy,
) -> Any:
    """Call `function` with its arguments cast to `target_dtype`, unless it is None.

    In C++: `call_cast` of `call.h`.
    """
    if target_dtype is None:
        return function(*args, **kwargs)
    cast_args, cast_kwargs = cast_arguments(args, kwargs, target_dtype, policy)
    return function(*cast_args, **cast_kwargs)
