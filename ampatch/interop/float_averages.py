"""DistributedDataParallel averages the gradients of half weights in FP32.

Its buckets have the dtype of the weights, so by itself it would add up the ranks' gradients in
half, and what `no_sync` kept apart would have to be rounded to half before.  A communication hook
sends the bucket in FP32 instead, with what earlier passes have left at the masters added.  DDP
gets the average back in half; the masters get it in FP32.

A hook that the script has registered itself stays, and decides: `allreduce_hook` averages in half.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..config.opt_levels import HALF_TYPES
from ..torch_private.ddp import add_comm_hook


class KeepsGradients(Protocol):
    """Keeps the FP32 gradients of half weights."""

    def take_unreduced(self, half: Tensor) -> Tensor | None:
        """The FP32 gradient that waits for ranks, for the last time; or None."""

    def note_average(self, half: Tensor, average: Tensor) -> None:
        """The average of the pass that is running, which will be in this tensor."""


Keepers = Callable[[Sequence[Tensor]], Sequence[Sequence[KeepsGradients]]]
"""Who keeps the gradients of each parameter; of most there is one, of FP32 weights none."""


class FloatAverages:
    """The communication hook of one wrapper.

    `counts_live`: averages are over the ranks that still have data (`join`); `is_joined`: this
    rank has none.
    """

    def __init__(self, group: Any, keepers: Keepers) -> None:
        self._group = group
        self._keepers = keepers
        self.counts_live = False
        self.is_joined = False

    def average(self, bucket: Any) -> Any:
        """The future average of a bucket of gradients."""
        buffer = bucket.buffer()
        share = 1.0 / self._ranks(buffer)
        keepers = self._keepers_of(bucket, buffer)
        if not any(keepers):
            return self._sum(buffer.mul_(share), lambda total: total)
        wide = buffer.float()
        start = 0
        for half, keeping in zip(bucket.parameters(), keepers, strict=True):
            place = wide.as_strided(half.size(), _strides_in_bucket(half), start)
            start += half.numel()
            for keeper in () if self.is_joined else keeping:
                earlier = keeper.take_unreduced(half)
                if earlier is not None:
                    place.add_(earlier)
                keeper.note_average(half, place)
        _in_flight[id(wide)] = wide
        return self._sum(wide.mul_(share), buffer.copy_)

    def _keepers_of(self, bucket: Any, buffer: Tensor) -> Sequence[Sequence[KeepsGradients]]:
        if buffer.is_sparse or buffer.dtype not in HALF_TYPES:
            return []
        return self._keepers(bucket.parameters())

    def _ranks(self, buffer: Tensor) -> float:
        if not self.counts_live:
            return torch.distributed.get_world_size(self._group)
        live = torch.tensor([float(not self.is_joined)], device=buffer.device)
        torch.distributed.all_reduce(live, group=self._group)
        return float(live.item())

    def _sum(self, tensor: Tensor, finish: Callable[[Tensor], Tensor]) -> Any:
        def when_done(done: Any) -> Tensor:
            return finish(_value(done))

        _in_flight[id(when_done)] = when_done
        work = torch.distributed.all_reduce(tensor, group=self._group, async_op=True)
        return work.get_future().then(when_done)


_in_flight: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""What a thread of the process group still has: it needs the interpreter to let go of it.

That can be after the backward pass.  If the interpreter ends first, it aborts the process
("terminate called without an active exception").
"""
PATIENCE = 2.0  # seconds; after an error on another rank a thread may wait in vain


@atexit.register
def _let_threads_finish() -> None:
    last = time.monotonic() + PATIENCE
    while len(_in_flight) and time.monotonic() < last:
        time.sleep(0.001)


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """How DDP lays a gradient out: as its parameter, if that leaves no gaps.

    `bucket.gradients()` has all gradients in the order of their elements.
    """
    size = 1
    for stride, length in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if length != 1 and stride != size:
            return torch.empty(parameter.size(), device="meta").stride()
        size *= length
    return parameter.stride()


def _value(done: Any) -> Tensor:
    value = done.value()
    return value[0] if isinstance(value, (list, tuple)) else value


def _average(state: FloatAverages, bucket: Any) -> Any:
    return state.average(bucket)


_average.__annotations__.clear()  # DDP compares them with classes, and they are text here


def average_in_float(wrapper: DistributedDataParallel, keepers: Keepers) -> FloatAverages | None:
    """Have a wrapper average in FP32 from now on; None where the script has a hook of its own."""
    averages = FloatAverages(wrapper.process_group, keepers)
    return averages if add_comm_hook(wrapper, averages, _average) else None
