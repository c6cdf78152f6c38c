"""Watches the casts of patched calls from outside, with Python's profiling hook.

The hot path stays as it is, on or off: what a call was given, what it was cast to
and whether a weight's half copy was made or found is read off the frames of
`casting.casts` and `casting.weight_cache` as they return.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casting import batched_casts, special_ops, user_functions
from ampatch.casting import rules as casts
from ampatch.casting.weight_cache import WeightCache
from ampatch.errors import AmpatchError
from ampatch.session.session import registry

from .storages import StorageNotes
from .trees import tensors_in

HALVES = (torch.float16, torch.bfloat16)


def _inner(function: Callable, name: str = "patched") -> CodeType:
    """The code of the function called `name` that `function` makes."""
    codes = [code for code in function.__code__.co_consts if isinstance(code, CodeType)]
    return next(code for code in codes if code.co_name == name)


_BANNED = _inner(casts.banned)
_CALLS = {
    _inner(casts.replacement),
    _BANNED,
    _inner(special_ops.matrix_power),
    _inner(user_functions.user_function),
    _inner(user_functions.torch_function),
}
_CAST = casts.cast.__code__
_CACHE = WeightCache.cast.__code__
_TOGETHER = batched_casts.cast_together.__code__
_MAKING = {WeightCache.make.__code__, _TOGETHER}
_SEEN = {*_CALLS, _CAST, _CACHE, _TOGETHER}


@dataclasses.dataclass
class Calls:
    """One function: `casts` are tensors cast, `cached` those whose half copy was there.

    `bytes` are those that the casts wrote.  `to` counts the tensors that got each dtype.
    """

    calls: int = 0
    casts: int = 0
    cached: int = 0
    bytes: int = 0
    to: dict[torch.dtype, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Batches:
    """Weights that were cast together with others, each batch in one node of the graph."""

    batches: int = 0
    weights: int = 0
    bytes: int = 0


@dataclasses.dataclass
class Bounce:
    """Half to FP32 for one function, and what it returned back to half for the next."""

    times: int = 0
    bytes: int = 0


@dataclasses.dataclass
class _Running:
    name: str
    original: Any
    calls: Calls
    went_up: bool = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.made = False


class CastWatch:
    """Counts from `start` to `stop`, in the thread that starts it and those that begin later."""

    def __init__(self) -> None:
        self.functions: dict[str, Calls] = {}
        self.batches = Batches()
        self.bounces: dict[tuple[str, str], Bounce] = {}
        self.used: set[tuple[str, torch.dtype]] = set()  # device types and half types
        self._thread = _Thread()
        self._floated: StorageNotes[str] = StorageNotes()
        self._is_on = False

    def start(self) -> None:
        """Raises `AmpatchError` where another profiler is running: Python has one place."""
        if sys.getprofile() is not None:
            raise AmpatchError(
                "ampatch.report(...): another profiler is running in this thread, and Python has "
                "room for one (sys.setprofile). End that one, or another ampatch.report, first."
            )
        self._is_on = True
        registry.state.watch(+1)
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def stop(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        registry.state.watch(-1)
        threading.setprofile(None)
        if sys.getprofile() == self._event:  # else this is not the thread that started it
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            if code in _MAKING and arg.__name__ == "to":
                self._thread.made = True
            return
        if code not in _SEEN or not self._is_on:
            return
        if event == "call":
            self._begin(frame, code)
        elif event == "return":
            self._end(frame, code, arg)

    def _begin(self, frame: FrameType, code: CodeType) -> None:
        thread = self._thread
        if code is _CACHE:
            thread.made = False
        elif code in _CALLS:
            found = frame.f_locals
            original = found.get("original", found.get("function"))
            name = name_of(original)
            calls = self.functions.setdefault(name, Calls())
            # A banned function's call goes on through a second replacement of the same.
            if not (thread.running and thread.running[-1].original is original):
                calls.calls += 1
            thread.running.append(_Running(name, original, calls))

    def _end(self, frame: FrameType, code: CodeType, result: Any) -> None:
        running = self._thread.running
        if code is _TOGETHER:
            self._cast_together(result)
        elif code is _CAST:
            value = frame.f_locals["value"]
            if running and isinstance(result, Tensor) and result is not value:
                self._cast(running[-1], value, result)
        elif code in _CALLS and running:
            ended = running.pop()
            if ended.went_up:
                for tensor in tensors_in(result):
                    if tensor.dtype is torch.float32:
                        self._floated.set(tensor, ended.name)
            if ended.went_up and running and running[-1].original is ended.original:
                running[-1].went_up = True

    def _cast(self, call: _Running, value: Tensor, result: Tensor) -> None:
        calls, dtype = call.calls, result.dtype
        calls.to[dtype] = calls.to.get(dtype, 0) + 1
        size = result.numel() * result.element_size()
        if type(value) is Parameter and not self._thread.made:
            calls.cached += 1
        else:
            calls.casts += 1
            calls.bytes += size
        if dtype is torch.float32:
            call.went_up = True
            return
        self.used.add((result.device.type, dtype))
        source = self._floated.get(value)
        if source is not None:
            bounce = self.bounces.setdefault((source, call.name), Bounce())
            bounce.times += 1
            bounce.bytes += size

    def _cast_together(self, halves: Any) -> None:
        if halves is None or len(halves) < 2:  # it failed, or cast one weight by itself
            return
        found = self.batches
        found.batches += 1
        for half in halves:
            found.weights += 1
            found.bytes += half.numel() * half.element_size()


def name_of(original: Any) -> str:
    """A function's name as people write it."""
    made = registry.installation.replaced_by(original)
    named = original if made is None else made
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", str(named))
    if module == "torch._C._nn" and hasattr(torch.nn.functional, name):
        module = "torch.nn.functional"
    return f"{module}.{name}" if module else name
