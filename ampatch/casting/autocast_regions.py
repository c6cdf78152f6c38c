"""Regions of `torch.autocast` in the user's code: of them and managed forwards the innermost wins.

While the patches are installed, entering a region puts the thread under a policy of its own.
A region that is disabled casts nothing on its device type.  One that is enabled inside a managed
forward at O1 says the half type: ampatch goes on casting, and torch's autocast is off.  Outside of
managed forwards torch's autocast casts, and ampatch does not.  A managed forward that begins in a
region is under its own policy again: see `CastState.enter_forward`.  Torch's own code that restores
the autocast state of a forward, for a recomputation or in a replica's thread, does not count as a
region.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from ..torch_private.autocast_callers import AUTOCAST
from ..torch_private.devices import device_types
from .cast_state import CastState
from .contexts import PolicyContext
from .policy import Policy
from .torch_autocast import (
    FORWARD_POLICY,
    asking_frame,
    devices_on,
    enters_for_user,
    function_context,
    is_enabled,
    nesting,
    set_enabled,
)

Make = Callable[[Callable], Callable]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[tuple[Any, PolicyContext, torch.dtype | None]] = []  # innermost last
        self.is_tracing = False  # Dynamo enters the regions that it traces


class AutocastRegions:
    """The regions that each thread is in, and the policy that each puts it under.

    A region is known by any object with `==`: a `torch.autocast`, or a state of the switch.
    """

    def __init__(self, state: CastState) -> None:
        self._state = state
        self.thread = _Thread()

    def places(self) -> list[tuple[str, str, Make]]:
        """`(where, name, make)` for what enters and leaves regions."""
        return [
            (AUTOCAST + ".autocast", "__init__", self._note),
            (AUTOCAST + ".autocast", "__enter__", self._enter),
            (AUTOCAST + ".autocast", "__exit__", self._exit),
        ]

    def begin(self) -> None:
        """The patches are installed: a region that this thread is already in counts too.

        Its exit calls no replacement: the `with` block has looked `__exit__` up before.  So
        its policy context is asked whether the region has ended.
        """
        if nesting() == 0:
            return
        found = self._state.current()
        policy = found
        for device in devices_on(device_types()):
            policy = without(policy, device)
        if policy is found:  # disabled, and for which device is not known
            policy = None
        PolicyContext(
            self._state,
            lambda: policy,
            by_user=False,
            has_ended=lambda: nesting() == 0,
            is_region=True,
        ).__enter__()

    def enter(self, region: Any, device: str, half: torch.dtype | None = None) -> None:
        """Enter a region for tensors on one type of device; `half` if ampatch may cast there."""
        self._state.drop_ended()
        found = self._state.current()
        if half is not None and self._is_in_forward(found) and found.casts_on(device):
            set_enabled(device, False)  # what leaves the region brings back what was before
            self._put_under(region, found.in_type(half))
        else:
            self._put_under(region, without(found, device), half)

    def _is_in_forward(self, found: Policy | None) -> TypeGuard[Policy]:
        """Whether all calls follow the tables here: only managed forwards have such a policy."""
        return (
            found is not None
            and found.follows_tables
            and found.gate is None
            and self._state.thread.policy is found
        )

    def leave(self, region: Any) -> bool:
        """Leave the innermost region that equals `region`; whether there was one."""
        entered = self.thread.entered
        for place in reversed(range(len(entered))):
            found, context, torch_half = entered[place]
            if found == region:
                del entered[place]
                context.__exit__()
                self._state.thread.torch_half = torch_half
                return True
        return False

    def _put_under(
        self, region: Any, policy: Policy | None, torch_half: torch.dtype | None = None
    ) -> None:
        # Within a block of the user's, one that is enabled holds inside models, as the block does.
        by_user = torch_half is not None and self._state.under_user_control()
        context = PolicyContext(self._state, lambda: policy, by_user, is_region=True)
        self._state.push(policy, context)
        here = self._state.thread
        self.thread.entered.append((region, context, here.torch_half))
        here.torch_half = torch_half

    def _note(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(region: Any, *args: Any, **kwargs: Any) -> None:
            original(region, *args, **kwargs)
            asked = kwargs.get("enabled", args[_ENABLED] if len(args) > _ENABLED else True)
            if asked and region.device not in device_types():
                setattr(region, _ELSEWHERE, True)

        return __init__

    def _enter(self, original: Callable) -> Callable:
        def enter(region: Any) -> Any:
            entered = original(region)
            frame = asking_frame()
            if self.thread.is_tracing or hasattr(region, _ELSEWHERE) or not enters_for_user(frame):
                return entered
            context = function_context(frame, "decorate_bwd")
            if hasattr(context, FORWARD_POLICY):  # the casts of its forward, and no autocast
                set_enabled(region.device, False)
                self._put_under(region, getattr(context, FORWARD_POLICY))
            else:
                half = region.fast_dtype if is_enabled(region.device) else None
                self.enter(region, region.device, half)
            return entered

        return enter

    def _exit(self, original: Callable) -> Callable:
        def exit(region: Any, *exception: Any) -> Any:
            self.leave(region)
            return original(region, *exception)

        return exit


_ENABLED = 2
"""The position of `enabled` among the arguments of torch.autocast."""

_ELSEWHERE = "_ampatch_elsewhere"
"""Attribute of a region that is to cast on a device which this machine lacks: it says nothing."""


def without(policy: Policy | None, device: str) -> Policy | None:
    """`policy`, except for tensors on one type of device; the same if it casts none there."""
    if policy is None:
        return None
    if policy.devices is None:
        if len(device_types()) == 1:  # whatever device the region names: it can only mean this one
            return None
        left = set(device_types())
    else:
        left = set(policy.devices)
    if policy.devices is not None and device not in left:
        return policy
    left -= {device, "meta"}
    return dataclasses.replace(policy, devices=left) if left else None
