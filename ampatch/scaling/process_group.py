"""The processes that train together: how many they are, and the overflow flag that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ..torch_private.dtensors import groups_of
from ..torch_private.probes import are_ranks
from .scale_value import Flag


def world_size() -> int:
    """How many processes train together; 1 without `torch.distributed`."""
    return torch.distributed.get_world_size() if are_ranks() else 1


def sharing_groups(group: Any, grads: list[Tensor]) -> list[Any]:
    """The process groups that share the flag of these gradients: of DTensors' meshes, and `group`.

    A rank has its own part of a DTensor, and an inf may be in one part alone.
    """
    groups = groups_of(grads)
    return groups if group is None or group in groups else [*groups, group]


def share_flag(flag: Flag, groups: list[Any], near: Sequence[Tensor]) -> Flag:
    """A flag that is set on all ranks of these process groups if it is on one.

    What the host knows travels on the device of the tensors in `near`.
    """
    if isinstance(flag, Tensor):
        shared = flag
    else:
        device = near[0].device if near else torch.device("cpu")
        shared = torch.tensor(float(flag), dtype=torch.float32, device=device)
    for group in groups:
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
    return shared if isinstance(flag, Tensor) else bool(shared.item())
