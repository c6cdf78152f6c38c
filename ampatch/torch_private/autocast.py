"""torch's own autocast in this thread: its state, its switches, and who in torch queries it.

All functions here call torch's originals, which were bound at import, before any replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .devices import device_types

AUTOCAST_MODULE = "torch.amp.autocast_mode"
"""The module of `torch.autocast` and of `custom_fwd`, which queries the state from there."""

CASTING_MODULES = frozenset(("torch.nested._internal.sdpa",))
"""Modules of torch that query the autocast dtype in order to cast to it."""


def has_custom_fwd(context: object) -> bool:
    """Whether the context is of a custom Function whose forward is decorated with `custom_fwd`."""
    return hasattr(context, "_fwd_used_autocast")


is_torch_autocast_enabled = torch.is_autocast_enabled
set_torch_autocast_enabled = torch.set_autocast_enabled
torch_autocast_dtype = torch.get_autocast_dtype


def call_with_torch_autocast(
    device: str, dtype: torch.dtype, function: Callable, args: Any, kwargs: Any
) -> Any:
    """Call a function with torch's own autocast enabled, without entering a region.

    torch's autocast cache is disabled, because inside a region it would outlive the call.
    """
    before = (
        is_torch_autocast_enabled(device),
        torch_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )
    try:
        _set_torch_autocast(device, True, dtype, False)
        return function(*args, **kwargs)
    finally:
        _set_torch_autocast(device, *before)


def _set_torch_autocast(device: str, enabled: bool, dtype: torch.dtype, has_cache: bool) -> None:
    torch.set_autocast_cache_enabled(has_cache)
    torch.set_autocast_dtype(device, dtype)
    set_torch_autocast_enabled(device, enabled)


def devices_with_torch_autocast() -> list[str]:
    """The device types on which torch's autocast is enabled."""
    return [device for device in device_types() if is_torch_autocast_enabled(device)]


def disable_torch_autocast(devices: Sequence[str]) -> None:
    """Disable torch's autocast for these device types."""
    for device in devices:
        set_torch_autocast_enabled(device, False)


def enable_torch_autocast(devices: Sequence[str]) -> None:
    """Enable torch's autocast again for these device types."""
    for device in devices:
        set_torch_autocast_enabled(device, True)
