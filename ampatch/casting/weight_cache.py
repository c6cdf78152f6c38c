"""Half copies of FP32 weights, fresh for every outermost forward.

A weight that several calls use within a forward is cast once; with which other
weights, `batched_casts.Plan` says.  The copies belong to that forward and its graph:
nothing writes into them again, and none is used by a later forward, since a `.data`
write (an EMA swap) and fused optimizers change weights without raising `_version`.
Each thread has copies of its own: another thread's forward may begin and end at any
moment.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled

from ..surroundings import is_recording
from .batched_casts import Plan, cast_together, may_be_planned


@dataclasses.dataclass
class CacheInfo:
    """Counts since the session opened: `hits`, `misses` (casts made) and `entries` held now."""

    hits: int = 0
    misses: int = 0
    entries: int = 0


class _Copy:
    """A half copy, and the state of its weight when it was made.  The weight is held, so that
    its id stays its own.
    """

    __slots__ = ("dtype", "half", "is_used", "pointer", "version", "weight")

    def __init__(self, weight: Tensor, half: Tensor, is_used: bool) -> None:
        self.weight = weight
        self.version = weight._version
        self.pointer = weight.data_ptr()
        self.dtype = half.dtype
        self.half = half
        self.is_used = is_used


class _Forward:
    """The copies of one forward: those in its graph and those outside, by the weights' ids."""

    __slots__ = ("alone", "below", "graphed", "in_inference", "opener", "plan", "plain", "touched")

    def __init__(self, opener: object, plan: Plan | None, below: _Forward | None) -> None:
        self.opener = opener
        self.plan = plan
        self.below = below
        self.in_inference = torch.is_inference_mode_enabled()
        self.graphed: dict[int, _Copy] = {}
        self.plain: dict[int, _Copy] = {}
        self.alone: dict[int, Tensor] = {}  # weights cast by themselves, in the order of use
        self.touched: set[int] = set()  # weights whose `.data` somebody may be writing into

    def copies(self, weight: Tensor) -> dict[int, _Copy]:
        """Where a copy of `weight` belongs that is used here and now."""
        return self.graphed if weight.requires_grad and is_grad_enabled() else self.plain


class _Thread(threading.local):
    def __init__(self) -> None:
        self.forward: _Forward | None = None


class WeightCache:
    """Casts of leaf weights; open only while a managed model's forward runs, in its thread."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self.hits = self.misses = 0

    def open(self, opener: object, plan: Plan | None = None) -> None:
        """Start a forward of `opener`: nothing is used as an earlier one left it.

        Within another model's forward nothing happens: the outermost counts.
        An opener that finds itself was interrupted (Ctrl-C skips hooks) or calls
        itself; both are safe with no copies.
        """
        thread = self._thread
        if thread.forward is not None and thread.forward.opener is not opener:
            return
        if is_recording():
            thread.forward = None
            return
        thread.forward = _Forward(opener, plan if plan is not None and plan.begin() else None, None)

    def close(self, opener: object = None, is_whole: bool = False) -> None:
        """End the forward of `opener`, or (None) whatever is open.  Safe to call when closed.

        Of a forward that is `is_whole`, not one that failed, the plan learns.
        """
        thread = self._thread
        forward = thread.forward
        if forward is None or opener is not None and opener is not forward.opener:
            return
        thread.forward = None
        if is_whole and forward.plan is not None:
            _learn(forward.plan, forward)

    def apart(self, function: Callable) -> Callable:
        """`function` with copies of its own, each weight cast at its use, by itself.

        For what an activation checkpoint runs twice: both times it makes the same calls, and
        a weight used twice sums its gradients in the same dtype as without the checkpoint.
        """

        def with_own_copies(*args: object, **kwargs: object) -> object:
            thread = self._thread
            found = thread.forward
            own = None if is_recording() else _Forward(with_own_copies, None, found)
            thread.forward = own
            try:
                return function(*args, **kwargs)
            finally:
                if thread.forward is own:
                    thread.forward = found

        return with_own_copies

    def info(self) -> CacheInfo:
        """A snapshot of the counts; entries are this thread's."""
        forward = self._thread.forward
        entries = 0 if forward is None else len(forward.graphed) + len(forward.plain)
        return CacheInfo(self.hits, self.misses, entries)

    def forget(self, weight: Tensor) -> None:
        """Somebody may write into the weight and raise no version: cast it at each use from now
        to the end of this thread's forward.
        """
        forward = self._thread.forward
        while forward is not None:
            forward.touched.add(id(weight))
            forward.graphed.pop(id(weight), None)
            forward.plain.pop(id(weight), None)
            forward = forward.below

    def find(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of `weight` in `dtype` made earlier in this forward; None: there is none."""
        forward = self._thread.forward
        if forward is None:
            return None
        copy = forward.copies(weight).get(id(weight))
        if (
            copy is None
            or copy.version != weight._version
            or copy.pointer != weight.data_ptr()
            or copy.dtype is not dtype
        ):
            return None
        if forward.in_inference and not torch.is_inference_mode_enabled():
            return None
        copy.is_used = True
        self.hits += 1
        return copy.half

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`: the copy made earlier in this forward, or a new one."""
        half = self.find(weight, dtype)
        if half is not None:
            return half
        forward = self._thread.forward
        if forward is None or id(weight) in forward.touched:
            return weight.to(dtype)
        if _must_be_alone(forward, weight):
            self.misses += 1
            return weight.to(dtype)
        return self._cast_bucket(forward, weight, dtype)

    def _cast_bucket(self, forward: _Forward, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a weight, and those that go with it and have no copy yet."""
        copies = forward.copies(weight)
        together = [weight]
        if forward.plan is not None and dtype is not torch.float32:
            bucket = forward.plan.bucket_of.get(id(weight))
            if bucket is None:
                forward.alone.setdefault(id(weight), weight)
            elif id(weight) not in copies and may_be_planned(weight):
                together = [
                    one
                    for one in bucket
                    if id(one) not in copies
                    and id(one) not in forward.touched
                    and forward.copies(one) is copies
                    and one.device == weight.device
                    and may_be_planned(one)
                ]
        self.misses += len(together)
        halves = cast_together(together, dtype, copies is forward.graphed)
        for one, half in zip(together, halves, strict=True):
            copies[id(one)] = _Copy(one, half, one is weight)
        return copies[id(weight)].half


def _must_be_alone(forward: _Forward, weight: Tensor) -> bool:
    """Whether a copy may not be kept: it would leak out of a trace or a transform, or could not be
    saved for a backward pass.
    """
    return (
        is_recording()
        or weight.is_inference()
        or forward.in_inference is not torch.is_inference_mode_enabled()
    )


def _learn(plan: Plan, forward: _Forward) -> None:
    unused = [
        key
        for copies in (forward.graphed, forward.plain)
        for key, copy in copies.items()
        if not copy.is_used
    ]
    new = [weight for weight in forward.alone.values() if may_be_planned(weight)]
    if new or unused:
        plan.learn(new, unused)
