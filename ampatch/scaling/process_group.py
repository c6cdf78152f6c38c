"""The processes that train together: their number, and the overflow flag that they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from ..torch_private.dtensors import PLAIN_TYPES, meshes_of
from ..torch_private.probes import is_distributed
from .scale_value import OverflowFlag


def world_size() -> int:
    """How many processes train together; 1 without `torch.distributed`."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def trains_with_others() -> bool:
    """Whether other processes train the same model, so that gradients may come from them too.

    Horovod does not use `torch.distributed`.
    """
    if is_distributed():
        return torch.distributed.get_world_size() > 1
    return "horovod.torch" in sys.modules


class FlagGroups(NamedTuple):
    """The process groups that share a flag; `are_all`: one of them has all processes."""

    groups: list[Any]
    are_all: bool


_NO_GROUPS = FlagGroups([], are_all=False)


def flag_groups(group: Any, grads: list[Tensor]) -> FlagGroups:
    """The process groups of the meshes of DTensor gradients, and `group` if it is not None.

    A rank has only its shard of a DTensor, and an inf may be in one shard only.
    """
    if group is None and PLAIN_TYPES.issuperset(map(type, grads)):
        return _NO_GROUPS
    meshes = meshes_of(grads)
    groups = dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))
    sizes = [mesh.size() for mesh in meshes]
    if group is not None:
        groups[group] = None
        sizes.append(torch.distributed.get_world_size(group))
    return FlagGroups(list(groups), bool(groups) and world_size() in sizes)


def share_flag(flag: OverflowFlag, groups: list[Any], like: Sequence[Tensor]) -> OverflowFlag:
    """The flag, set on all ranks of these process groups if it is set on one of the ranks.

    A `bool` is sent through the device of the tensors in `like`.
    """
    if isinstance(flag, Tensor):
        shared = flag
    else:
        device = like[0].device if like else torch.device("cpu")
        shared = torch.tensor(float(flag), dtype=torch.float32, device=device)
    for group in groups:
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
    return shared if isinstance(flag, Tensor) else bool(shared.item())
