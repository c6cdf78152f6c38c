"""`DistributedDataParallel` at its making: the ranks compare the settings they train with.

Around DTensors it puts each rank's part in their place, and makes DTensors of these anew in every
forward.  It knows the parts by an attribute, which the half copies of lent weights lack.
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

Agree = Callable[[nn.Module, Any], None]
IsLent = Callable[[Tensor], bool]


def replacements(agree: Agree, is_lent: IsLent) -> list[Replacement]:
    """What to replace.

    `agree(model, process_group)` raises where ranks that are about to wrap a model do not train it
    with the same settings.  `is_lent(parameter)` says whether forwards have a half copy of it.
    """
    if not torch.distributed.is_available():
        return []

    def make(original: Callable) -> Callable:
        return _wrapping(original, agree, is_lent)

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


def _wrapping(original: Callable, agree: Agree, is_lent: IsLent) -> Callable:
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
