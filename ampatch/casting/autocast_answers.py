"""What `torch.is_autocast_enabled` and `get_autocast_dtype` answer while ampatch casts.

`custom_fwd`, attention kernels and libraries ask in order to act as under autocast.  They get
True and the policy's half type, if calls on the device are cast.  Torch's own modules get
torch's answer, since they save the state to restore it, guard on it or choose kernels by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.devices import device_types
from .autocast_regions import Make
from .cast_state import CastState
from .policy import Policy
from .torch_autocast import (
    FORWARD_POLICY,
    asking_frame,
    casts_to_answer,
    device_of,
    function_context,
    is_enabled,
)


def casting_policy(state: CastState, device: str) -> Policy | None:
    """The policy of this thread, if calls with tensors on `device` are cast under it."""
    policy = state.table_policy()
    if policy is None:
        return None
    return policy if device in (policy.devices or device_types()) else None


def places(state: CastState) -> list[tuple[str, str, Make]]:
    """`(where, name, make)` for the functions of torch that answer."""
    return [
        ("torch", "is_autocast_enabled", lambda original: _enabled(original, state, "cuda")),
        ("torch", "get_autocast_dtype", lambda original: _dtype(original, state, "cuda")),
        ("torch", "is_autocast_cpu_enabled", lambda original: _enabled(original, state, "cpu")),
        ("torch", "get_autocast_cpu_dtype", lambda original: _dtype(original, state, "cpu")),
        ("torch", "get_autocast_gpu_dtype", lambda original: _dtype(original, state, "cuda")),
    ]


def _enabled(original: Callable, state: CastState, usual: str) -> Callable:
    def is_autocast_enabled(*args: Any, **kwargs: Any) -> bool:
        if original(*args, **kwargs):
            return True
        policy = casting_policy(state, device_of(args, kwargs, usual))
        if is_dynamo_compiling():
            return policy is not None
        frame = asking_frame()
        context = function_context(frame, "decorate_fwd")
        if context is not None:
            casts_inputs = frame.f_locals.get("cast_inputs") is not None
            is_off = casts_inputs and policy is not None
            setattr(context, FORWARD_POLICY, None if is_off else state.current())
        return policy is not None and (context is not None or casts_to_answer(frame))

    return is_autocast_enabled


def _dtype(original: Callable, state: CastState, usual: str) -> Callable:
    def get_autocast_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
        device = device_of(args, kwargs, usual)
        policy = casting_policy(state, device)
        if policy is None or is_enabled(device):
            return original(*args, **kwargs)
        if not is_dynamo_compiling():
            frame = asking_frame()
            if function_context(frame, "decorate_fwd") is None and not casts_to_answer(frame):
                return original(*args, **kwargs)
        return policy.half_type

    return get_autocast_dtype
