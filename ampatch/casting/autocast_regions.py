"""Regions of `torch.autocast` in the user's code: they take precedence over ampatch's casts.

While the patches are installed, entering a region puts the thread under a policy of its own:
ampatch casts nothing on the region's device type, whether the region is enabled (torch's
autocast casts there) or not (nothing casts).  Torch's own code that restores the autocast
state of a forward, for a recomputation or in a replica's thread, does not count as a region.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from ..torch_private.autocast_callers import AUTOCAST
from ..torch_private.devices import device_types
from .cast_state import CastState
from .contexts import PolicyContext
from .policy import Policy
from .torch_autocast import (
    FORWARD_POLICY,
    asking_frame,
    enters_for_user,
    function_context,
    is_enabled,
    nesting,
    set_enabled,
)

Make = Callable[[Callable], Callable]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[tuple[Any, PolicyContext | None]] = []  # innermost last
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
        for device in device_types():
            if is_enabled(device):
                policy = without(policy, device)
        if policy is found:  # disabled, and for which device is not known
            policy = None
        PolicyContext(
            self._state, lambda: policy, by_user=True, has_ended=lambda: nesting() == 0
        ).__enter__()

    def enter(self, region: Any, device: str) -> None:
        """Enter a region for tensors on one type of device."""
        found = self._state.current()
        policy = without(found, device)
        context = self._put_under(policy) if policy is not found or found is None else None
        self.thread.entered.append((region, context))

    def leave(self, region: Any) -> bool:
        """Leave the innermost region that equals `region`; whether there was one."""
        entered = self.thread.entered
        for place in reversed(range(len(entered))):
            found, context = entered[place]
            if found == region:
                del entered[place]
                if context is not None:
                    context.__exit__()
                return True
        return False

    def _put_under(self, policy: Policy | None) -> PolicyContext:
        context = self._state.under(lambda: policy, by_user=True)
        context.__enter__()
        return context

    def _enter(self, original: Callable) -> Callable:
        def enter(region: Any) -> Any:
            entered = original(region)
            frame = asking_frame()
            if self.thread.is_tracing or not enters_for_user(frame):
                return entered
            context = function_context(frame, "decorate_bwd")
            if hasattr(context, FORWARD_POLICY):  # the casts of its forward, and no autocast
                set_enabled(region.device, False)
                policy = getattr(context, FORWARD_POLICY)
                self.thread.entered.append((region, self._put_under(policy)))
            else:
                self.enter(region, region.device)
            return entered

        return enter

    def _exit(self, original: Callable) -> Callable:
        def exit(region: Any, *exception: Any) -> Any:
            self.leave(region)
            return original(region, *exception)

        return exit


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
