"""Questions about torch's `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import sys
from typing import Any

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: Any) -> bool:
    """Whether the optimizer is one.  While nothing has imported the class, none is."""
    kind = getattr(sys.modules.get(_MODULE), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def steps_in_backward(optimizer: Any) -> bool:
    """Whether hooks of DistributedDataParallel make its steps (`overlap_with_ddp`)."""
    return getattr(optimizer, "_overlap_with_ddp", False)


def build_buckets(optimizer: Any) -> None:
    """Make its parameters views of buckets once more, if it has buckets at all."""
    optimizer._build_param_buckets()


def is_in_join(optimizer: Any) -> bool:
    """Whether a `Join` context has it, whose ranks may have no data any more."""
    config = getattr(optimizer, "_join_config", None)
    return config is not None and config.enable
