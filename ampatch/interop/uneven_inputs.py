"""`DistributedDataParallel.join()`: a rank that has run out of data gets what the others trained.

torch gives it the weights of a rank that trained to the end.  With this replacement it gets that
rank's FP32 master weights and loss scales too.  Otherwise it would go on with masters and a loss
scale of its own, and the ranks would average gradients of different scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..casting.patches import Replacement
from .float_averages import FloatAverages


class Trained(Protocol):
    """What ranks have of a training besides the model's own tensors."""

    def refuse_uneven(self, model: nn.Module) -> None:
        """Raise `AmpatchError` if the ranks communicate in a way that `join` does not know."""

    def broadcast_masters(
        self, parameters: Sequence[Tensor], send: Callable[[Tensor], None]
    ) -> None:
        """Have `send` make the masters of these parameters equal on all ranks."""

    def broadcast_scales(self, model: nn.Module, send: Callable[[list], None]) -> None:
        """Have `send` make the loss scales of the model's losses equal on all ranks."""


Averages = Callable[[DistributedDataParallel], FloatAverages | None]


def replacements(trained: Trained, averages: Averages) -> list[Replacement]:
    """What to replace.  `averages(wrapper)` is what averages in FP32 for it, if it does."""
    if not torch.distributed.is_available():
        return []
    return [
        (
            DistributedDataParallel,
            "join_hook",
            lambda original: _following(original, trained, averages),
        )
    ]


def _following(original: Callable, trained: Trained, averages: Averages) -> Callable:
    @functools.wraps(original)
    def join_hook(self: DistributedDataParallel, **kwargs: Any) -> _FollowingHook:
        trained.refuse_uneven(self.module)
        in_float = averages(self)  # also on a rank that has no data at all
        if in_float is not None:
            in_float.counts_live = not kwargs.get("divide_by_initial_world_size", True)
            in_float.is_joined = False
        return _FollowingHook(original(self, **kwargs), self, trained, in_float)

    return join_hook


class _FollowingHook:
    """A `JoinHook`, as `hook` of a wrapper; at the end all ranks have what the last to join has."""

    def __init__(
        self,
        hook: Any,
        wrapper: DistributedDataParallel,
        trained: Trained,
        in_float: FloatAverages | None,
    ) -> None:
        self._hook = hook
        self._wrapper = wrapper
        self._trained = trained
        self._in_float = in_float

    def main_hook(self) -> None:
        """Another iteration of the ranks that still have data."""
        if self._in_float is not None:
            self._in_float.is_joined = True
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has data any more."""
        self._hook.post_hook(is_last_joiner)
        if self._in_float is not None:
            self._in_float.counts_live = self._in_float.is_joined = False
        distributed, group = torch.distributed, self._wrapper.process_group
        mine = distributed.get_rank(group) if is_last_joiner else -1
        leader = torch.tensor([mine], device=self._wrapper.join_device)
        distributed.all_reduce(leader, distributed.ReduceOp.MAX, group=group)
        source = distributed.get_global_rank(group, int(leader.item()))
        self._trained.broadcast_masters(
            list(self._wrapper.module.parameters()),
            lambda master: distributed.broadcast(master, source, group=group),
        )
        self._trained.broadcast_scales(
            self._wrapper.module,
            lambda states: distributed.broadcast_object_list(states, source, group=group),
        )
