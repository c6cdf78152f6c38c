"""Regions of `torch.autocast`: torch's own words about precision, which win over our casts.

While the patches are in, entering a region puts the thread under a policy of its own:
without casts of ours for the region's device type, be the region enabled (torch's
autocast casts there) or not (nobody does).  Torch's machinery that brings back the
autocast state of a forward, for a recomputation or in a replica's thread, says nothing new.

To code outside torch that asks whether autocast is enabled, our casts count as autocast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..torch_private.autocast_callers import ASK_TO_CAST, AUTOCAST, ENTER_FOR_USER
from ..torch_private.devices import device_types
from .contexts import Under
from .dynamo_tables import trace_call
from .patches import PatchSet
from .policy import CastState, Policy

Make = Callable[[Callable], Callable]

_PASSED_ON = frozenset(
    (__name__, "contextlib", "torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode")
)

_KEPT = "_ampatch_forward_policy"
"""Attribute of a custom Function's context: what its backward is under."""


class _Entered(threading.local):
    def __init__(self) -> None:
        self.regions: list[tuple[Any, Under | None]] = []  # innermost last
        self.is_tracing = False  # Dynamo enters the regions that it traces


class _Earlier(Under):
    """Covers a region that was entered before the patches: its exit calls nothing of ours."""

    __slots__ = ()

    @property
    def by_user(self) -> bool:
        """As long as the region lasts; when it is over, this goes too."""
        if _nesting() > 0:
            return True
        self._state.pop(self)
        return self._state.under_user_control()

    @by_user.setter
    def by_user(self, value: bool) -> None:
        pass


class _Off(NamedTuple):
    """A region in which the raw switch has turned our casts off."""

    device: str


class AutocastRegions:
    """What our casts do in regions of `torch.autocast`, and what is said of them there."""

    def __init__(self, state: CastState) -> None:
        self._state = state
        self._entered = _Entered()

    def places(self) -> list[tuple[str, str, Make]]:
        """`(where, name, make)` for what enters and leaves regions, and for what asks."""
        return [
            (AUTOCAST + ".autocast", "__enter__", self._enter),
            (AUTOCAST + ".autocast", "__exit__", self._exit),
            ("torch", "set_autocast_enabled", lambda original: self._set(original, "cuda")),
            ("torch", "is_autocast_enabled", lambda original: self._ask(original, "cuda")),
            ("torch", "get_autocast_dtype", lambda original: self._ask_dtype(original, "cuda")),
            ("torch", "set_autocast_cpu_enabled", lambda original: self._set(original, "cpu")),
            ("torch", "is_autocast_cpu_enabled", lambda original: self._ask(original, "cpu")),
            ("torch", "get_autocast_cpu_dtype", lambda original: self._ask_dtype(original, "cpu")),
            ("torch", "get_autocast_gpu_dtype", lambda original: self._ask_dtype(original, "cuda")),
        ]

    def begin(self) -> None:
        """The patches are in: a region that this thread is in already counts too."""
        state = self._state
        if _nesting() == 0:
            return
        policy = state.current()
        for device in device_types():
            if _is_enabled(device):
                policy = without(policy, device)
        if policy is state.current():  # disabled, and for which device is not known
            policy = None
        _Earlier(state, lambda: policy, True).__enter__()

    def end(self) -> None:
        """The patches go: nobody will tell any more when the raw switch is turned in this thread."""
        for region, _ in list(self._entered.regions):
            if isinstance(region, (str, _Off)):
                self._out_of(region)

    # Entering and leaving

    def _into(self, region: Any, device: str) -> None:
        found = self._state.current()
        policy = without(found, device)
        under = None
        if policy is not found or found is None:
            under = self._put_under(policy)
        self._entered.regions.append((region, under))

    def _put_under(self, policy: Policy | None) -> Under:
        under = self._state.under(lambda: policy, by_user=True)
        under.__enter__()
        return under

    def _out_of(self, region: Any) -> bool:
        """Leave a region, the innermost of this name; whether there was one."""
        regions = self._entered.regions
        for place in reversed(range(len(regions))):
            found, under = regions[place]
            if found == region:
                del regions[place]
                if under is not None:
                    under.__exit__()
                return True
        return False

    def _enter(self, original: Callable) -> Callable:
        def enter(region: Any) -> Any:
            entered = original(region)
            frame = _asking()
            if self._entered.is_tracing or not _is_meant(frame):
                return entered
            context = _context(frame, "decorate_bwd")
            if hasattr(context, _KEPT):  # the casts of its forward, and no autocast
                _set_enabled(region.device, False)
                policy = getattr(context, _KEPT)
                self._entered.regions.append((region, self._put_under(policy)))
            else:
                self._into(region, region.device)
            return entered

        return enter

    def _exit(self, original: Callable) -> Callable:
        def exit(region: Any, *exception: Any) -> Any:
            self._out_of(region)
            return original(region, *exception)

        return exit

    def _set(self, original: Callable, usual: str) -> Callable:
        """The raw switch; `torch.autocast` uses it too, and has been heard.

        Off, and our casts are off with it; on again, they are what was on, unless torch's own
        autocast was.
        """

        def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
            if is_dynamo_compiling() or _is_torch_s(_asking()):
                original(*args, **kwargs)
                return
            device = _device_of(args, kwargs, usual)
            is_on, was_on = bool((*args, *kwargs.values())[-1]), _is_enabled(device)
            was_off = self._out_of(_Off(device))
            if not (is_on and was_off):
                original(*args, **kwargs)
            self._out_of(device)
            if is_on and not was_off:
                self._into(device, device)
            elif not is_on and not was_on and self.counts_as_autocast(device) is not None:
                self._into(_Off(device), device)

        return set_autocast_enabled

    # What is said of our casts

    def counts_as_autocast(self, device: str) -> Policy | None:
        """The policy here and now, if under it calls with tensors on `device` are cast."""
        policy = self._state.table_policy()
        if policy is None:
            return None
        return policy if device in (policy.devices or device_types()) else None

    def _ask(self, original: Callable, usual: str) -> Callable:
        def is_autocast_enabled(*args: Any, **kwargs: Any) -> bool:
            if original(*args, **kwargs):
                return True
            policy = self.counts_as_autocast(_device_of(args, kwargs, usual))
            if is_dynamo_compiling():
                return policy is not None
            frame = _asking()
            context = _context(frame, "decorate_fwd")
            if context is not None:
                casts_inputs = frame.f_locals.get("cast_inputs") is not None
                is_off = casts_inputs and policy is not None
                setattr(context, _KEPT, None if is_off else self._state.current())
            return policy is not None and (context is not None or _is_told(frame))

        return is_autocast_enabled

    def _ask_dtype(self, original: Callable, usual: str) -> Callable:
        def get_autocast_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
            device = _device_of(args, kwargs, usual)
            policy = self.counts_as_autocast(device)
            if policy is None or _is_enabled(device):
                return original(*args, **kwargs)
            if not is_dynamo_compiling():
                frame = _asking()
                if _context(frame, "decorate_fwd") is None and not _is_told(frame):
                    return original(*args, **kwargs)
            return policy.half_type

        return get_autocast_dtype

    # torch.compile

    def correct_dynamo(
        self, contexts: ModuleType, patches: PatchSet, ask_state: Callable[[], CastState]
    ) -> None:
        """Dynamo knows regions by itself, and enters what it traces: the trace takes our part."""
        variable = getattr(contexts, "AutocastModeVariable", None)
        if variable is None or not hasattr(variable, "enter") or not hasattr(variable, "exit"):
            return

        def traced(tx: Any, method: str) -> None:
            trace_call(tx, ask_state).call_method(tx, method, [], {})

        def enter(original: Callable) -> Callable:
            def entered(region: Any, tx: Any) -> Any:
                self._entered.is_tracing = True
                try:
                    found = original(region, tx)
                finally:
                    self._entered.is_tracing = False
                traced(tx, "enter_region")
                return found

            return entered

        def leave(original: Callable) -> Callable:
            def left(region: Any, tx: Any, *args: Any) -> Any:
                traced(tx, "leave_region")
                return original(region, tx, *args)

            return left

        patches.replace(variable, "enter", enter)
        patches.replace(variable, "exit", leave)


@contextlib.contextmanager
def autocast_on(devices: Iterable[str]) -> Iterator[None]:
    """torch's own autocast for these device types; no region, and ours know nothing of it."""
    found = {device: _is_enabled(device) for device in devices}
    for device in found:
        _set_enabled(device, True)
    try:
        yield
    finally:
        for device, was in found.items():
            _set_enabled(device, was)


def without(policy: Policy | None, device: str) -> Policy | None:
    """`policy`, but for tensors on one type of device; the same where it casts none there."""
    if policy is None:
        return None
    if policy.devices is None:
        if len(device_types()) == 1:  # wherever the region is meant for: it can only be about these
            return None
        left = set(device_types())
    else:
        left = set(policy.devices)
    if policy.devices is not None and device not in left:
        return policy
    left -= {device, "meta"}
    return dataclasses.replace(policy, devices=left) if left else None


def _nesting() -> int:
    """How many regions this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _asking() -> FrameType:
    """The frame that entered a region or asked, past those that only pass it on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSED_ON:
        frame = frame.f_back
    return frame


def _home(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def _is_torch_s(frame: FrameType) -> bool:
    return _home(frame).partition(".")[0] == "torch"


def _is_meant(frame: FrameType) -> bool:
    return _home(frame) in ENTER_FOR_USER or not _is_torch_s(frame)


def _is_told(frame: FrameType) -> bool:
    return _home(frame) in ASK_TO_CAST or not _is_torch_s(frame)


def _context(frame: FrameType, name: str) -> Any:
    """The context of a custom Function, where `custom_fwd` or `custom_bwd` (`name`) asks."""
    if frame.f_code.co_name != name or _home(frame) != AUTOCAST:
        return None
    args = frame.f_locals.get("args")
    return args[0] if args else None


def _device_of(args: tuple, kwargs: dict, usual: str) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, str):
            return value
    return usual


_is_enabled = torch.is_autocast_enabled
_set_enabled = torch.set_autocast_enabled
