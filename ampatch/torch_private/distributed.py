"""Processes that train together, asked once in each forward and step."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed import distributed_c10d as _c10d
except ImportError:  # built without, or kept elsewhere
    _c10d = None  # type: ignore[assignment]


def are_ranks() -> bool:
    """Whether `torch.distributed` has its default process group."""
    world = getattr(_c10d, "_world", None)
    if world is not None and hasattr(world, "_default_pg"):
        return world._default_pg is not None
    distributed = torch.distributed  # the public way takes 2 us
    return distributed.is_available() and distributed.is_initialized()


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward is running in this process, or None."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)
