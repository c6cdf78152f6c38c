"""What `torch.is_autocast_enabled` and `get_autocast_dtype` answer while ampatch casts.

`custom_fwd`, attention kernels and libraries ask in order to act as under autocast.  They get
True and the policy's half type, if calls on the device are cast.  Torch's own modules get
torch's answer, since they save the state to restore it, guard on it or choose kernels by it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
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
    policy = state.policy_here()
    if policy is None:
        return None
    return policy if device in (policy.devices or device_types()) else None


def _is_answered(policy: Policy, frame: FrameType) -> bool:
    """Whether who asks in the frame is told of the casts.

    Where only some calls are cast the others are not to be; `custom_fwd` is one of the former.
    """
    if function_context(frame, "decorate_fwd") is not None:
        return True
    return policy.gate is None and casts_to_answer(frame)


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
            return policy is not None and policy.gate is None
        frame = asking_frame()
        context = function_context(frame, "decorate_fwd")
        if context is not None:
            casts_inputs = frame.f_locals.get("cast_inputs") is not None
            is_off = casts_inputs and policy is not None
            setattr(context, FORWARD_POLICY, None if is_off else state.of_forward())
        return policy is not None and _is_answered(policy, frame)

    return is_autocast_enabled


def _dtype(original: Callable, state: CastState, usual: str) -> Callable:
    def get_autocast_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
        device = device_of(args, kwargs, usual)
        policy = casting_policy(state, device)
        if policy is None or is_enabled(device):
            return original(*args, **kwargs)
        if is_dynamo_compiling():
            is_answered = policy.gate is None
        else:
            is_answered = _is_answered(policy, asking_frame())
        return policy.half_type if is_answered else original(*args, **kwargs)

    return get_autocast_dtype
