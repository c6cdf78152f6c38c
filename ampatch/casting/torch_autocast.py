"""torch's own autocast in this thread: asked, and switched.

This module calls the functions that torch had when it was imported, not their replacements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..torch_private.devices import device_types

is_enabled = torch.is_autocast_enabled
set_enabled = torch.set_autocast_enabled
half_type = torch.get_autocast_dtype


def devices_on() -> list[str]:
    """The types of devices on which it is on."""
    return [device for device in device_types() if is_enabled(device)]


def switched_off(devices: Sequence[str]) -> Sequence[str]:
    """Switch it off for these device types, which are returned."""
    for device in devices:
        set_enabled(device, False)
    return devices


def switch_on(devices: Sequence[str]) -> None:
    """Switch it on again."""
    for device in devices:
        set_enabled(device, True)
