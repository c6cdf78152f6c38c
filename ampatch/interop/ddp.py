"""`DistributedDataParallel`: ranks that wrap a model compare their settings and scales.

`join()` is refused under a dynamic loss scale.

A model with DTensors (`device_mesh=`) is refused at O2.  DDP replaces each DTensor with the rank's
local tensor, and rebuilds the DTensor in every forward.  DDP finds the local tensors by an
attribute that half copies do not have.
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

from ..casting.patches import Patch
from ..errors import AmpatchError
from ..torch_private.dtensors import is_dtensor

CompareRanks = Callable[[nn.Module, Any], None]
"""`(model, process_group)`: raises if ranks that wrap a model have different settings."""

HasHalfCopy = Callable[[Tensor], bool]
"""Whether forwards of a managed model have a half copy of this weight."""


def init_patches(compare_ranks: CompareRanks, has_half_copy: HasHalfCopy) -> list[Patch]:
    """The patch of `DistributedDataParallel.__init__`, which compares ranks that wrap a model."""
    if not torch.distributed.is_available():
        return []

    def make(original: Callable) -> Callable:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            arguments = signature.bind_partial(self, *args, **kwargs).arguments
            model, mesh = arguments.get("module"), arguments.get("device_mesh")
            compares = arguments.get("init_sync", True)
            if mesh is not None:
                _refuse_dtensors_with_half_copies(arguments["module"], has_half_copy)
            if compares and isinstance(model, nn.Module) and torch.distributed.is_initialized():
                group = arguments.get("process_group") if mesh is None else mesh.get_group(0)
                compare_ranks(model, group)
            original(self, *args, **kwargs)

        return __init__

    return [(DistributedDataParallel, "__init__", make)]


def _refuse_dtensors_with_half_copies(module: nn.Module, has_half_copy: HasHalfCopy) -> None:
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter) and has_half_copy(parameter):
            raise AmpatchError(
                f"DistributedDataParallel({type(module).__name__}, device_mesh=...): {name} is a "
                "DTensor. Forwards at O2 use half copies of DTensors, and DDP would not use these. "
                'Nothing was changed. Expected opt_level="O1". Tensor and data parallel at O2: '
                "DTensors on a mesh of two dimensions, as in docs/distributed/tensor_parallel.md."
            )


def join_patches(refuse_uneven_inputs: Callable[[nn.Module], None]) -> list[Patch]:
    """The patch of `DistributedDataParallel.join_hook`, which may refuse uneven inputs."""
    if not torch.distributed.is_available():
        return []

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def join_hook(self: DistributedDataParallel, **kwargs: Any) -> Any:
            refuse_uneven_inputs(self)
            return original(self, **kwargs)

        return join_hook

    return [(DistributedDataParallel, "join_hook", make)]
