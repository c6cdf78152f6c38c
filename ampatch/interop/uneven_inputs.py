"""`DistributedDataParallel.join()`: a rank that has run out of data gets what the others trained.

torch gives it the weights of a rank that trained to the end.  With this replacement it gets that
rank's loss scales too.  Otherwise the ranks would average gradients of different scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..casting.patches import Replacement


class Trained(Protocol):
    """What ranks have of a training besides the model's own tensors."""

    def refuse_uneven(self, model: nn.Module) -> None:
        """Raise `AmpatchError` if the ranks communicate in a way that `join` does not know."""

    def broadcast_scales(self, model: nn.Module, send: Callable[[list], None]) -> None:
        """Have `send` make the loss scales of the model's losses equal on all ranks."""


def replacements(trained: Trained) -> list[Replacement]:
    """What to replace."""
    if not torch.distributed.is_available():
        return []
    make = functools.partial(_following, trained=trained)
    return [(DistributedDataParallel, "join_hook", make)]


def _following(original: Callable, trained: Trained) -> Callable:
    @functools.wraps(original)
    def join_hook(self: DistributedDataParallel, **kwargs: Any) -> _FollowingHook:
        trained.refuse_uneven(self)
        return _FollowingHook(original(self, **kwargs), self, trained)

    return join_hook


class _FollowingHook:
    """A `JoinHook`, as `hook` of a wrapper; at the end all ranks have what the last to join has."""

    def __init__(self, hook: Any, wrapper: DistributedDataParallel, trained: Trained) -> None:
        self._hook = hook
        self._wrapper = wrapper
        self._trained = trained

    def main_hook(self) -> None:
        """Another iteration of the ranks that still have data."""
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has data any more."""
        self._hook.post_hook(is_last_joiner)
        distributed, group = torch.distributed, self._wrapper.process_group
        mine = distributed.get_rank(group) if is_last_joiner else -1
        leader = torch.tensor([mine], device=self._wrapper.join_device)
        distributed.all_reduce(leader, distributed.ReduceOp.MAX, group=group)
        source = distributed.get_global_rank(group, int(leader.item()))
        self._trained.broadcast_scales(
            self._wrapper,
            lambda states: distributed.broadcast_object_list(states, source, group=group),
        )
