"""The processes that train together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ..surroundings import are_ranks


def world_size() -> int:
    """How many processes train together; 1 without `torch.distributed`."""
    return torch.distributed.get_world_size() if are_ranks() else 1


def share_flag(flag: Tensor, group: Any) -> None:
    """Make a 0-dim flag the highest of all ranks of a process group, in place."""
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
