"""`DistributedDataParallel` at its making: the ranks compare the settings they train with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..casting.patches import Replacement

Agree = Callable[[nn.Module, Any], None]


def replacements(agree: Agree) -> list[Replacement]:
    """What to replace.

    `agree(model, process_group)` raises where ranks that are about to wrap a model do not train it
    with the same settings.
    """
    if not torch.distributed.is_available():
        return []
    return [(DistributedDataParallel, "__init__", lambda original: _wrapping(original, agree))]


def _wrapping(original: Callable, agree: Agree) -> Callable:
    names = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        given = names.bind_partial(self, *args, **kwargs).arguments
        model, mesh = given.get("module"), given.get("device_mesh")
        is_sent = given.get("init_sync", True)
        if is_sent and isinstance(model, nn.Module) and torch.distributed.is_initialized():
            agree(model, given.get("process_group") if mesh is None else mesh.get_group(0))
        original(self, *args, **kwargs)

    return __init__
