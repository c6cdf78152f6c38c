"""torch.autocast beside ampatch: its regions, its switch, and queries of its state.

*A region* of `torch.autocast` is a call on the thread's stack.  In a disabled region, nothing is
cast on its device type.  A region enabled inside a managed forward at O1 sets the half dtype:
ampatch continues to cast, and torch's autocast is off.  Outside of managed forwards, torch's
autocast casts, and ampatch does not.  A managed forward that begins in a region is under its own
policy again (see `CastState.policy_arguments`).  torch's own code enters regions too, to restore
the autocast state of a forward.  The code in such a region is under the policy of that forward
(`context_propagation`).

*`torch.set_autocast_enabled`*, called by the user's code, sets torch's autocast and leaves
ampatch's casts unchanged; a warning names the remedy.

*`torch.is_autocast_enabled` and `get_autocast_dtype`* return True and the policy's half dtype if
calls on the device are cast, because libraries call them to behave as under autocast, and so does
`custom_fwd`.  torch's other modules get torch's values, because they save the state to restore it,
guard on it, or choose kernels with it.

So the caller's Python frame decides one question: *does torch's own code read the state, or set
it?*  Only the switch and the queries look at the frame.  Three other ways were tried:

* The same values for all callers.  Then `autocast.__enter__`, checkpoints and Dynamo restore
  ampatch's values as torch's state, and transformer layers and CUDA graphs do not take their fast
  paths.
* A flag that is set while torch's own code runs.  A module's forward queries the state in the
  middle, where no flag can be set, and torch's code also runs the user's code.
* A list of the functions that save the state.  The list gets longer with each version of torch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..log import logger
from ..torch_private.autocast import (
    AUTOCAST_MODULE,
    CASTING_MODULES,
    is_torch_autocast_enabled,
    set_torch_autocast_enabled,
)
from ..torch_private.devices import device_types
from ..torch_private.dynamo import is_inside_compiler
from .calls import BACKWARD, REGION, CastState, thread_calls
from .patches import MakeReplacement
from .policy import Policy

_IGNORED_ATTRIBUTE = "_ampatch_ignored"
"""Attribute of a region that changes no casts of ampatch: see `ignore_region`."""


class AutocastInterop:
    """Replacements of torch.autocast's functions, which act on the calling thread."""

    def __init__(self, state: CastState) -> None:
        self._state = state

    def regions(self) -> list[tuple[str, str, MakeReplacement]]:
        """`(where, name, make)` for enter and exit of regions."""
        return [
            (AUTOCAST_MODULE + ".autocast", "__enter__", self._make_enter),
            (AUTOCAST_MODULE + ".autocast", "__exit__", self._make_exit),
        ]

    def state_functions(self) -> list[tuple[str, str, MakeReplacement]]:
        """`(where, name, make)` for the functions that set the state or query it."""
        return [
            ("torch", "set_autocast_enabled", partial(self._make_set_enabled, default="cuda")),
            ("torch", "set_autocast_cpu_enabled", partial(self._make_set_enabled, default="cpu")),
            ("torch", "is_autocast_enabled", partial(self._make_is_enabled, default="cuda")),
            ("torch", "is_autocast_cpu_enabled", partial(self._make_is_enabled, default="cpu")),
            ("torch", "get_autocast_dtype", partial(self._make_get_dtype, default="cuda")),
            ("torch", "get_autocast_cpu_dtype", partial(self._make_get_dtype, default="cpu")),
            ("torch", "get_autocast_gpu_dtype", partial(self._make_get_dtype, default="cuda")),
        ]

    def exit_regions(self) -> None:
        """Exit all regions of this thread.  To be called before their patches are undone."""
        for call in list(thread_calls.stack):
            if call.kind == REGION:
                self._state.exit(call)

    # Regions

    def _make_enter(self, original: Callable) -> Callable:
        def enter(region: Any) -> Any:
            if hasattr(region, _IGNORED_ATTRIBUTE) or is_inside_compiler():
                return original(region)
            was_enabled = is_torch_autocast_enabled(region.device)
            entered = None
            try:
                entered = original(region)
                self._enter_call(region)
                return entered
            except BaseException:  # the `with` statement will not call `__exit__`
                if entered is not None:
                    region.__exit__(None, None, None)
                set_torch_autocast_enabled(region.device, was_enabled)
                raise

        return enter

    def _make_exit(self, original: Callable) -> Callable:
        def exit(region: Any, *exception: Any) -> Any:
            try:
                if thread_calls.stack:
                    self._state.exit_block(region)
            except BaseException:  # KeyboardInterrupt: no other code exits the region
                self._state.exit_block(region)
                raise
            finally:
                try:
                    result = original(region, *exception)
                except BaseException:
                    set_torch_autocast_enabled(region.device, region.prev)
                    raise
            return result

        return exit

    def _enter_call(self, region: torch.autocast) -> None:
        """Enter the region's call, with its policy for tensors on its type of device."""
        state, device = self._state, region.device
        policy, is_region_enabled = state.current_policy(), is_torch_autocast_enabled(device)
        is_custom_bwd = bool(thread_calls.stack) and thread_calls.stack[-1].kind == BACKWARD
        if policy is None or not policy.casts_on_device(device):
            pass
        elif is_custom_bwd and is_region_enabled:
            # The region's exit restores the previous state.
            set_torch_autocast_enabled(device, False)
        elif is_region_enabled and policy.condition is None:
            set_torch_autocast_enabled(device, False)
            policy = policy.with_half_dtype(region.fast_dtype)
        else:
            policy = without_device(policy, device)
        state.enter_block(policy, REGION, region)

    # The switch

    def _make_set_enabled(self, original: Callable, default: str) -> Callable:
        def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if is_dynamo_compiling() or _is_of_torch(_module_name(sys._getframe(1))):
                return
            device = _device_of(args, kwargs, default)
            if self._state.current_policy_for_device(device) is not None:
                logger.warning(
                    "torch.set_autocast_enabled(%r, ...) sets torch's own autocast; ampatch's "
                    "casts stay. To run code without them write `with torch.autocast(%r, "
                    "enabled=False):` or `with ampatch.disable_casts():`.",
                    device,
                    device,
                )

        return set_autocast_enabled

    # Queries

    def _make_is_enabled(self, original: Callable, default: str) -> Callable:
        def is_autocast_enabled(*args: Any, **kwargs: Any) -> bool:
            if original(*args, **kwargs):
                return True
            caller = None if is_dynamo_compiling() else sys._getframe(1)
            if caller is not None and _wants_torchs_state(caller):
                return False
            return self._policy_to_report(caller, _device_of(args, kwargs, default)) is not None

        return is_autocast_enabled

    def _make_get_dtype(self, original: Callable, default: str) -> Callable:
        def get_autocast_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
            caller = None if is_dynamo_compiling() else sys._getframe(1)
            if caller is not None and _wants_torchs_state(caller):
                return original(*args, **kwargs)
            device = _device_of(args, kwargs, default)
            policy = (
                None
                if is_torch_autocast_enabled(device)
                else self._policy_to_report(caller, device)
            )
            return original(*args, **kwargs) if policy is None else policy.half_dtype

        return get_autocast_dtype

    def _policy_to_report(self, caller: FrameType | None, device: str) -> Policy | None:
        """The policy to report as the autocast state of `device`; None to report torch's state.

        A policy with a condition casts only some calls, and libraries must not cast the others.  So
        such a policy is reported only to `custom_fwd`.
        """
        policy = self._state.current_policy_for_device(device)
        if policy is None or policy.condition is None:
            return policy
        return policy if caller is not None and _module_name(caller) == AUTOCAST_MODULE else None


def ignore_region(region: Any) -> None:
    """Have a region of torch.autocast leave ampatch's casts unchanged when it is entered."""
    setattr(region, _IGNORED_ATTRIBUTE, True)


def _module_name(frame: FrameType) -> Any:
    """The name of the module of the frame's code."""
    return frame.f_globals.get("__name__")


@lru_cache(maxsize=1024)  # a hit is one C call
def _is_of_torch(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == "torch"


def _wants_torchs_state(frame: FrameType) -> bool:
    """Whether the Python frame is of torch's own code, which needs torch's own state."""
    module = _module_name(frame)
    if not _is_of_torch(module) or module in CASTING_MODULES:
        return False
    return module != AUTOCAST_MODULE or isinstance(frame.f_locals.get("self"), torch.autocast)


def _device_of(args: tuple, kwargs: dict, default: str) -> str:
    """The device type in the arguments of one of torch's autocast functions, else `default`."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, str):
            return value
    return default


def without_device(policy: Policy, device: str) -> Policy | None:
    """Return `policy` without casts on one device type, or `policy` itself if it has none there.

    Returns None if no device type remains.
    """
    devices = set(device_types() if policy.devices is None else policy.devices)
    if device not in devices:
        return policy
    devices -= {device, "meta"}
    return dataclasses.replace(policy, devices=devices) if devices else None
