"""torch's own autocast: its state, and the code that calls its functions.

The state is read and set by the functions that torch had when this module was imported,
not by their replacements.  The caller of a replacement is known by its frame: a call from
torch's own modules, which save and restore the state, says nothing about the user's wishes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from ..torch_private.autocast_callers import ASK_TO_CAST, AUTOCAST, ENTER_FOR_USER

FORWARD_POLICY = "_ampatch_forward_policy"
"""Attribute of a custom Function's context: the policy that its backward is under."""

_PASSED_ON = frozenset(
    (
        *(f"{__package__}.autocast_{part}" for part in ("answers", "regions", "switch")),
        *("contextlib", "torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode"),
    )
)

is_enabled = torch.is_autocast_enabled
set_enabled = torch.set_autocast_enabled
half_type = torch.get_autocast_dtype


def devices_on(devices: Iterable[str]) -> list[str]:
    """The types of devices on which torch's own autocast is on in this thread."""
    return [device for device in devices if is_enabled(device)]


def nesting() -> int:
    """How many regions of autocast this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextlib.contextmanager
def autocast_on(devices: Iterable[str]) -> Iterator[None]:
    """Switch torch's own autocast on for these device types, without entering a region."""
    found = {device: is_enabled(device) for device in devices}
    for device in found:
        set_enabled(device, True)
    try:
        yield
    finally:
        for device, was in found.items():
            set_enabled(device, was)


def device_of(args: tuple, kwargs: dict, usual: str) -> str:
    """The device type that a call of torch's autocast functions names, or the `usual` one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, str):
            return value
    return usual


def asking_frame() -> FrameType:
    """The frame that called the replacement which calls this, past those that only pass it on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSED_ON:
        frame = frame.f_back
    return frame


def is_torch_s(frame: FrameType) -> bool:
    """Whether torch's own code runs in the frame."""
    return _module(frame).partition(".")[0] == "torch"


def enters_for_user(frame: FrameType) -> bool:
    """Whether the frame enters a region because the user's code asked for it."""
    return _module(frame) in ENTER_FOR_USER or not is_torch_s(frame)


def casts_to_answer(frame: FrameType) -> bool:
    """Whether the frame asks about autocast in order to act as under autocast."""
    return _module(frame) in ASK_TO_CAST or not is_torch_s(frame)


def function_context(frame: FrameType, wrapper: str) -> Any:
    """The context of a custom Function, where torch's `wrapper` of it runs in the frame.

    `custom_fwd` makes the wrapper "decorate_fwd", `custom_bwd` "decorate_bwd".
    """
    if frame.f_code.co_name != wrapper or _module(frame) != AUTOCAST:
        return None
    args = frame.f_locals.get("args")
    return args[0] if args else None


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""
