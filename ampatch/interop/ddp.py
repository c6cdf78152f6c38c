"""`DistributedDataParallel`: ranks that wrap a model compare their settings and scales.

`join()` is refused under a dynamic loss scale.

DDP puts each rank's local tensor in the place of a DTensor, and makes the DTensor anew in every
forward.  It knows the local tensors by an attribute, which the half copies of weights lack.
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
                "DTensor, of which forwards at O2 have half copies. DDP would not use these. "
                'Nothing was changed. Expected opt_level="O1". Tensor and data parallel at O2: '
                "DTensors on a mesh of two dimensions, as in docs/distributed/tensor_parallel.md."
            )


def at_join(refuse_uneven: Callable[[nn.Module], None]) -> list[Replacement]:
    """What to replace, for ranks with uneven inputs."""
    if not torch.distributed.is_available():
        return []

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def join_hook(self: DistributedDataParallel, **kwargs: Any) -> Any:
            refuse_uneven(self)
            return original(self, **kwargs)

        return join_hook

    return [(DistributedDataParallel, "join_hook", make)]
