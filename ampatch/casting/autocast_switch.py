"""`torch.set_autocast_enabled`, called by the user's code: a region without a `with` block.

Switched on: torch's autocast casts, and ampatch does not, as in a region of `torch.autocast`.
Switched off while torch's autocast was off: the call means ampatch's casts.  They are off
until the switch is on again, which then restores these casts and not torch's autocast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from .autocast_answers import casting_policy
from .autocast_regions import AutocastRegions, Make
from .cast_state import CastState
from .torch_autocast import asking_frame, device_of, is_enabled, is_torch_s


@dataclasses.dataclass(frozen=True)
class _TorchOn:
    """The region in which the switch has turned torch's autocast on."""

    device: str


@dataclasses.dataclass(frozen=True)
class _CastsOff:
    """The region in which the switch has turned ampatch's casts off."""

    device: str


class AutocastSwitch:
    """What the raw switch does to ampatch's casts, in the thread that turns it."""

    def __init__(self, state: CastState, regions: AutocastRegions) -> None:
        self._state = state
        self._regions = regions

    def places(self) -> list[tuple[str, str, Make]]:
        """`(where, name, make)` for the switch under its two names."""
        return [
            ("torch", "set_autocast_enabled", lambda original: self._set(original, "cuda")),
            ("torch", "set_autocast_cpu_enabled", lambda original: self._set(original, "cpu")),
        ]

    def end(self) -> None:
        """The patches go: leave this thread's regions, since the next turn will not be seen."""
        for region, *_ in list(self._regions.thread.entered):
            if isinstance(region, (_TorchOn, _CastsOff)):
                self._regions.leave(region)

    def _set(self, original: Callable, usual: str) -> Callable:
        def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
            if is_dynamo_compiling() or is_torch_s(asking_frame()):
                original(*args, **kwargs)  # torch.autocast uses it, and is a region itself
                return
            turn = self._turn_on if (*args, *kwargs.values())[-1] else self._turn_off
            turn(device_of(args, kwargs, usual), lambda: original(*args, **kwargs))

        return set_autocast_enabled

    def _turn_on(self, device: str, original: Callable[[], None]) -> None:
        were_casts = self._regions.leave(_CastsOff(device))
        if not were_casts:
            original()
        self._regions.leave(_TorchOn(device))
        if not were_casts:
            self._regions.enter(_TorchOn(device), device)

    def _turn_off(self, device: str, original: Callable[[], None]) -> None:
        was_on = is_enabled(device)
        self._regions.leave(_CastsOff(device))
        original()
        self._regions.leave(_TorchOn(device))
        if not was_on and casting_policy(self._state, device) is not None:
            self._regions.enter(_CastsOff(device), device)
