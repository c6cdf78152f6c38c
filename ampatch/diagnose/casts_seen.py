"""Counts the casts of patched calls: the observer behind `ampatch.report`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casting.tables import BUILTINS
from ampatch.session import facade

from .tensors import ByStorage, tensors_in


@dataclasses.dataclass
class Calls:
    """The casts for one function.

    `casts` counts tensors that were cast, `cached` weights that already had a half copy.  `bytes`
    counts the bytes that the casts wrote.  `to` counts the tensors by the dtype of the result.
    """

    calls: int = 0
    casts: int = 0
    cached: int = 0
    bytes: int = 0
    to: dict[torch.dtype, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Batches:
    """Weights that were cast in batches, with one node of the graph per batch."""

    batches: int = 0
    weights: int = 0
    bytes: int = 0


@dataclasses.dataclass
class Bounce:
    """Casts to FP32 for one function whose result is cast back to half for the next one."""

    times: int = 0
    bytes: int = 0


@dataclasses.dataclass
class _RunningCall:
    name: str
    casts_to_fp32: bool = False


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.running: list[_RunningCall] = []
        self.new_weight_copies: list[Tensor] = []  # made for the next call


class CastWatch:
    """Counts casts from `start` to `stop`, in all threads."""

    def __init__(self) -> None:
        self.functions: dict[str, Calls] = {}
        self.batches = Batches()
        self.bounces: dict[tuple[str, str], Bounce] = {}
        self.used: set[torch.dtype] = set()  # the half dtypes that were used
        self._thread = _ThreadState()
        self._results_in_fp32: ByStorage[str] = ByStorage()

    def start(self) -> None:
        """Begin to count."""
        facade.observe_casts(self)

    def stop(self) -> None:
        """Stop counting.  A second call does nothing."""
        facade.stop_observing_casts(self)

    # Called for each patched call; see `CastObserver`

    def call_begins(self, function: Callable) -> None:
        name = name_of(function)
        self.functions.setdefault(name, Calls()).calls += 1
        self._thread.running.append(_RunningCall(name))

    def call_ends(self, function: Callable, result: Any) -> None:
        ended = self._thread.running.pop()
        self._thread.new_weight_copies.clear()
        if ended.casts_to_fp32:
            for tensor in tensors_in(result):
                if tensor.dtype is torch.float32:
                    self._results_in_fp32.set(tensor, ended.name)

    def was_cast(self, function: Callable, before: Tensor, after: Tensor) -> None:
        name, dtype = name_of(function), after.dtype
        calls = self.functions[name]
        calls.to[dtype] = calls.to.get(dtype, 0) + 1
        size = after.nbytes
        is_new = any(after is new for new in self._thread.new_weight_copies)
        if type(before) is Parameter and not is_new:
            calls.cached += 1
        else:
            calls.casts += 1
            calls.bytes += size
        if dtype is torch.float32:
            self._thread.running[-1].casts_to_fp32 = True
            return
        self.used.add(dtype)
        source = self._results_in_fp32.get(before)
        if source is not None:
            bounce = self.bounces.setdefault((source, name), Bounce())
            bounce.times += 1
            bounce.bytes += size

    def copies_made(self, half_copies: Sequence[Tensor]) -> None:
        if len(half_copies) == 1:
            self._thread.new_weight_copies.extend(half_copies)
            return
        self.batches.batches += 1
        for half in half_copies:
            self.batches.weights += 1
            self.batches.bytes += half.nbytes


def name_of(original: Any) -> str:
    """The public name of a function, with its module."""
    replacement = facade.replacement_of(original)
    named = original if replacement is None else replacement
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", str(named))
    if module == BUILTINS["torch.nn.functional"] and hasattr(torch.nn.functional, name):
        module = "torch.nn.functional"
    return f"{module}.{name}" if module else name
