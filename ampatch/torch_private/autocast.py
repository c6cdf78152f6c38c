"""torch's own autocast in this thread: its state, its switches, and which modules of torch ask.

All by torch's original functions, which were bound at the import, before any replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .devices import device_types

AUTOCAST = "torch.amp.autocast_mode"
"""The module of `torch.autocast`, and of `custom_fwd`, which asks from there."""

ASK_TO_CAST = frozenset(("torch.nested._internal.sdpa",))
"""Modules that ask about autocast in order to cast to the answer."""


def has_custom_fwd(context: object) -> bool:
    """Whether `context` is of a custom Function whose forward has `custom_fwd`."""
    return hasattr(context, "_fwd_used_autocast")


is_enabled = torch.is_autocast_enabled
set_enabled = torch.set_autocast_enabled
half_dtype = torch.get_autocast_dtype


def call_with(device: str, half: torch.dtype, function: Callable, args: Any, kwargs: Any) -> Any:
    """Call a function with torch's own autocast on, without entering a region.

    The cache is off: in a region it would outlive the call.
    """
    before = is_enabled(device), half_dtype(device), torch.is_autocast_cache_enabled()
    try:
        _set(device, True, half, False)
        return function(*args, **kwargs)
    finally:
        _set(device, *before)


def _set(device: str, enabled: bool, half: torch.dtype, has_cache: bool) -> None:
    torch.set_autocast_cache_enabled(has_cache)
    torch.set_autocast_dtype(device, half)
    set_enabled(device, enabled)


def devices_on() -> list[str]:
    """The device types on which autocast is on."""
    return [device for device in device_types() if is_enabled(device)]


def switch_off(devices: Sequence[str]) -> None:
    """Switch autocast off for these device types."""
    for device in devices:
        set_enabled(device, False)


def switch_on(devices: Sequence[str]) -> None:
    """Switch autocast on again for these device types."""
    for device in devices:
        set_enabled(device, True)
