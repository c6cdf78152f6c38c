"""Custom operators with a kernel for autocast: under ampatch's casts they run that kernel.

`custom_op(...).register_autocast` and `torch.library.register_autocast` put a kernel of
torch's in front of an operator: it casts the inputs to the dtype that was named, and runs
the operator without autocast.  Called while ampatch casts, such an operator runs
with torch's autocast switched on and ampatch's casts off, for that one call.

Without any such operator nothing is replaced but the two ways to register one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.library
from torch.compiler import is_dynamo_compiling

from ..torch_private.custom_ops import OPERATOR_CLASSES, qualified_name, registered_kernels
from ..torch_private.devices import autocast_keys
from .cast_state import CastState
from .patches import PatchSet
from .torch_autocast import autocast_on


class LibraryOps:
    """Has operators with an autocast kernel run it while ampatch casts."""

    def __init__(self, state: CastState, patches: PatchSet) -> None:
        self._state = state
        self._patches = patches
        self._is_watching = False

    def install(self) -> None:
        """To be called with the patches; `patches.undo` takes it out."""
        for owner in (torch.library.CustomOpDef, torch.library):
            if hasattr(owner, "register_autocast"):
                self._patches.replace(owner, "register_autocast", self._registering)
        self._patches.on_undo(self._forget)
        self._watch_if_needed()

    def _forget(self) -> None:
        self._is_watching = False

    def _watch_if_needed(self) -> None:
        if not self._is_watching and any("/Autocast" in place for place in registered_kernels()):
            self._is_watching = True
            for owner in OPERATOR_CLASSES:
                self._patches.replace(owner, "__call__", self._calling)

    def _registering(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def register_autocast(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self._watch_if_needed()
            return found

        return register_autocast

    def _calling(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def __call__(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
            state = self._state
            if (state.process is None and not state.per_thread) or is_dynamo_compiling():
                return original(self_, *args, **kwargs)
            devices = [
                device
                for device in _devices_of(qualified_name(self_))
                if (policy := state.policy_on(device)) is not None
                and (policy.gate is None or policy.gate(args, kwargs))
            ]
            if not devices:
                return original(self_, *args, **kwargs)
            with state.casts_off, autocast_on(devices):
                return original(self_, *args, **kwargs)

        return __call__


def _devices_of(name: str) -> list[str]:
    place = name.replace("::", "/")
    registered = registered_kernels()
    return [device for key, device in autocast_keys().items() if f"{place}/{key}" in registered]
