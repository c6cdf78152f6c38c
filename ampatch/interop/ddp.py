"""`DistributedDataParallel`: at its making ranks compare settings, and `join()` takes scales along.

Around DTensors it puts each rank's part in their place, and makes DTensors of these anew in every
forward.  It knows the parts by an attribute, which the half copies of lent weights lack.

A rank that has run out of data in `join()` gets the weights of a rank that trained to the end, and
here that rank's loss scales too: ranks would average gradients of different scales.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..casting.patches import Replacement
from ..errors import AmpatchError
from ..torch_private.dtensors import is_dtensor
from .rank_agreement import Trained

Agree = Callable[[nn.Module, Any], None]
"""`agree(model, process_group)` raises where ranks that are about to wrap a model do not train it
with the same settings.
"""


IsLent = Callable[[Tensor], bool]
"""Whether forwards of a managed model have a half copy of this weight."""


def at_wrapping(agree: Agree, is_lent: IsLent) -> list[Replacement]:
    """What to replace, for ranks that wrap a model."""
    if not torch.distributed.is_available():
        return []

    def make(original: Callable) -> Callable:
        names = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            given = names.bind_partial(self, *args, **kwargs).arguments
            model, mesh = given.get("module"), given.get("device_mesh")
            is_sent = given.get("init_sync", True)
            if mesh is not None:
                _refuse_lent_dtensors(given["module"], is_lent)
            if is_sent and isinstance(model, nn.Module) and torch.distributed.is_initialized():
                agree(model, given.get("process_group") if mesh is None else mesh.get_group(0))
            original(self, *args, **kwargs)

        return __init__

    return [(DistributedDataParallel, "__init__", make)]


def _refuse_lent_dtensors(module: nn.Module, is_lent: IsLent) -> None:
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter) and is_lent(parameter):
            raise AmpatchError(
                f"DistributedDataParallel({type(module).__name__}, device_mesh=...): {name} is a "
                "DTensor, of which forwards at O2 have half copies. DDP would not know these. "
                'Nothing was changed. Expected opt_level="O1". Tensor and data parallel at O2: '
                "DTensors on a mesh of two dimensions, as in docs/distributed/tensor_parallel.md."
            )


def at_join(trained: Trained) -> list[Replacement]:
    """What to replace, for ranks with uneven inputs."""
    if not torch.distributed.is_available():
        return []

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def join_hook(self: DistributedDataParallel, **kwargs: Any) -> _FollowingHook:
            trained.refuse_uneven(self)
            trained.join_begins(self)
            return _FollowingHook(original(self, **kwargs), self, trained)

        return join_hook

    return [(DistributedDataParallel, "join_hook", make)]


class _FollowingHook:
    """A `JoinHook`, as `hook` of a wrapper; at the end all ranks have what the last to join has."""

    def __init__(self, hook: Any, wrapper: DistributedDataParallel, trained: Trained) -> None:
        self._wrapper = wrapper
        self._trained = trained
        self._hook = hook

    def main_hook(self) -> None:
        """Another iteration of the ranks that still have data."""
        self._trained.shadow(self._wrapper)
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
