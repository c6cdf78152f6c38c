"""DistributedDataParallel's first broadcast: settings are compared, master weights sent too.

The broadcast gives all ranks the half weights of rank 0, and does not know their masters.
With this replacement all ranks get the masters of rank 0 too, in FP32.  So a checkpoint that was
loaded before wrapping, or the weights that a model was built with, are not rounded.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..casting.patches import Replacement
from ..config.opt_levels import HALF_TYPES
from ..errors import AmpatchError
from ..torch_private.dtensors import is_dtensor
from .float_averages import FloatAverages, Keepers, average_in_float


def _refuse_half_dtensors(module: nn.Module) -> None:
    """With a mesh DDP takes DTensors out of the module for good, and what knows them with it."""
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter) and parameter.dtype in HALF_TYPES:
            raise AmpatchError(
                f"DistributedDataParallel({type(module).__name__}, device_mesh=...): {name} is a "
                f"DTensor in {parameter.dtype}. DDP would replace it in each forward, so that its "
                "FP32 values and the model's state_dict() would be lost. Nothing was changed. "
                'Expected FP32 weights: opt_level="O1". Tensor and data parallel at O2 and O3: '
                "DTensors on a mesh of two dimensions, as in docs/distributed/tensor_parallel.md."
            )


Agree = Callable[[nn.Module, Any], None]
Broadcast = Callable[[Sequence[Tensor], Callable[[Tensor], None]], None]


class WrappedModels:
    """The DistributedDataParallel wrappers that were noted here, held weakly.

    `keepers` says who keeps the gradients of half weights, which they average in FP32.
    """

    def __init__(self, keepers: Keepers) -> None:
        self._wrappers: list[tuple[weakref.ref, set[int]]] = []  # with ids of modules inside
        self._averages: weakref.WeakKeyDictionary[DistributedDataParallel, FloatAverages | None]
        self._averages = weakref.WeakKeyDictionary()
        self._keepers = keepers

    def __len__(self) -> int:
        """How many there may be: none, or some of which a few may have gone."""
        return len(self._wrappers)

    def note(self, wrapper: DistributedDataParallel) -> None:
        """A wrapper was made."""
        self._wrappers = [entry for entry in self._wrappers if entry[0]() is not None]
        self._wrappers.append((weakref.ref(wrapper), set(map(id, wrapper.module.modules()))))

    def reduces(self, model: Any) -> bool | None:
        """Whether DDP averages the gradients of the forward that begins; None: not in a DDP."""
        found = [wrapper.require_backward_grad_sync for wrapper in self._around(model)]
        return any(found) if found else None

    def average_in_float(self, model: Any) -> bool:
        """Have the wrappers of a model average in FP32; whether all do."""
        averages = [self.averages_of(wrapper) for wrapper in self._around(model)]  # asks each
        return None not in averages

    def averages_of(self, wrapper: DistributedDataParallel) -> FloatAverages | None:
        """What averages in FP32 for a wrapper; None where no weight needs it, or a hook is there.

        Every rank asks before the first backward pass.
        """
        if wrapper not in self._averages:
            if not any(self._keepers(list(wrapper.module.parameters()))):
                return None
            self._averages[wrapper] = average_in_float(wrapper, self._keepers)
        return self._averages[wrapper]

    def _around(self, model: Any) -> list[DistributedDataParallel]:
        return [
            wrapper
            for ref, modules in self._wrappers
            if id(model) in modules and (wrapper := ref()) is not None
        ]


def replacements(
    agree: Agree, broadcast: Broadcast, note: Callable[[DistributedDataParallel], None]
) -> list[Replacement]:
    """What to replace.

    `agree(model, process_group)` raises where ranks that are about to wrap a model do not train it
    with the same settings.  `broadcast(parameters, send)` calls `send` on the master of each
    parameter that has one; `note` is called with each wrapper that is made.
    """
    if not torch.distributed.is_available():
        return []
    return [
        (
            DistributedDataParallel,
            "__init__",
            lambda original: _wrapping(original, agree, broadcast, note),
        )
    ]


def _wrapping(
    original: Callable,
    agree: Agree,
    broadcast: Broadcast,
    note: Callable[[DistributedDataParallel], None],
) -> Callable:
    names = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        given = names.bind_partial(self, *args, **kwargs).arguments
        model, mesh = given.get("module"), given.get("device_mesh")
        is_sent = given.get("init_sync", True)
        if mesh is not None:
            _refuse_half_dtensors(given["module"])
        if is_sent and isinstance(model, nn.Module) and torch.distributed.is_initialized():
            agree(model, given.get("process_group") if mesh is None else mesh.get_group(0))
        original(self, *args, **kwargs)
        note(self)
        if not is_sent:
            return
        group = self.process_group
        first = torch.distributed.get_global_rank(group, 0)
        ignored = self.parameters_to_ignore
        parameters = [p for name, p in self.module.named_parameters() if name not in ignored]
        broadcast(
            parameters, lambda master: torch.distributed.broadcast(master, first, group=group)
        )

    return __init__
