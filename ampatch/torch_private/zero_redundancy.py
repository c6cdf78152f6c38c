"""What torch's `ZeroRedundancyOptimizer` keeps of its parameters, beside `param_groups`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

MODULE = "torch.distributed.optim.zero_redundancy_optimizer"

_BY_PARAMETER = ("_param_to_rank_cache", "_param_to_index_cache")
_BUILD_BUCKETS = "_build_param_buckets"
_CHECK_TYPES = "_verify_same_dense_param_type"
_OVERLAPS = "_overlap_with_ddp"
_JOIN_CONFIG = "_join_config"


def kind() -> Any:
    """The class; None while nothing has imported it."""
    return getattr(sys.modules.get(MODULE), "ZeroRedundancyOptimizer", None)


def is_zero(optimizer: Any) -> bool:
    """Whether the optimizer is one."""
    found = kind()
    return found is not None and isinstance(optimizer, found)


def takes_other_parameters(optimizer: Any) -> bool:
    """Whether its parameters can be exchanged for others, as `forget_parameters` allows."""
    return all(hasattr(optimizer, name) for name in (*_BY_PARAMETER, _BUILD_BUCKETS))


def steps_in_backward(optimizer: Any) -> bool:
    """Whether hooks of DistributedDataParallel make its steps (`overlap_with_ddp`)."""
    return getattr(optimizer, _OVERLAPS, False)


def leads_join(optimizer: Any) -> bool:
    """Whether it is the first in a `Join` context, which asks there who still has data."""
    config = getattr(optimizer, _JOIN_CONFIG, None)
    return config is not None and config.enable and config.is_first_joinable


def forget_parameters(optimizer: Any) -> None:
    """Empty its tables that have parameters as keys; it fills them again when it needs them."""
    for name in _BY_PARAMETER:
        getattr(optimizer, name).clear()


def build_buckets(optimizer: Any) -> None:
    """Make its parameters views of buckets once more, if it has buckets at all."""
    getattr(optimizer, _BUILD_BUCKETS)()


def allow_types(optimizer: Any) -> Callable[[], None]:
    """Have its constructor take parameters of several dtypes; returns what ends that.

    Where the check of this torch has another name, its constructor goes on refusing them.
    """
    vars(optimizer)[_CHECK_TYPES] = lambda: None
    return lambda: vars(optimizer).pop(_CHECK_TYPES, None)
