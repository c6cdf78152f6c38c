"""What was cast, for which function, and where time could be won.

with ampatch.report(model) as casts:
    train(model)
print(casts)

"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import ampatch
from ampatch import native
from ampatch.torch_private.modules import CONVOLUTIONS

from .advice import advice
from .casts_seen import HALVES, CastWatch
from .dtype_names import dtype_name
from .explain_text import as_text
from .models import Models, check_model
from .trees import tensors_in


def report(model: nn.Module | None = None) -> CastReport:
    """Count the casts that patched functions make, and the dtypes that modules take and give.

    Functions are counted in all threads until `remove()`, the end of a `with` block or, for
    a model that was given, `ampatch.deactivate()`; modules are those of `model`, or (None)
    all that run.  While it is on, patched calls take longer; off, nothing is left in place.
    Code that torch.compile has compiled is not seen.

    Raises `TypeError` if `model` is no module.
    """
    check_model(model, "report")
    return CastReport(model)


@dataclasses.dataclass
class ModuleUse:
    """One module: its class, its calls, and the dtypes of its inputs and outputs."""

    kind: str
    calls: int = 0
    takes: set[torch.dtype] = dataclasses.field(default_factory=set)
    gives: set[torch.dtype] = dataclasses.field(default_factory=set)
    odd_sizes: dict[str, int] = dataclasses.field(default_factory=dict)


class CastReport:
    """Counts while it is active; `str` of it is the report so far.

    `functions`, `batches` and `bounces` are `CastWatch`'s; `modules` has a
    `ModuleUse` for each module by its path.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._watch = CastWatch()
        self.functions = self._watch.functions
        self.batches = self._watch.batches
        self.bounces = self._watch.bounces
        self.modules: dict[str, ModuleUse] = {}
        self._watch.start()
        self._models = Models(model, left=self._left)
        self._stop = ampatch.observe(self)

    def remove(self) -> None:
        """Stop counting."""
        self._watch.stop()
        self._models.remove()
        self._stop()

    def __enter__(self) -> CastReport:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def on_deactivate(self) -> None:
        """`ampatch.deactivate()` also ends a report of a given model."""
        if not self._models.takes_all:
            self.remove()

    def _left(self, module: nn.Module, args: tuple, output: Any) -> None:
        name = self._models.names[module]
        use = self.modules.setdefault(name, ModuleUse(type(module).__name__))
        use.calls += 1
        for dtypes, tensors in ((use.takes, tensors_in(args)), (use.gives, tensors_in(output))):
            dtypes |= {tensor.dtype for tensor in tensors}
            self._watch.used |= {
                (tensor.device.type, tensor.dtype) for tensor in tensors if tensor.dtype in HALVES
            }
        use.odd_sizes = {what: n for what, n in _sizes(module).items() if n % 8}

    @property
    def used(self) -> set[tuple[str, torch.dtype]]:
        """The half types in use, and on which device types."""
        return self._watch.used

    def advice(self) -> list[str]:
        """Where time could be won; measuring this CPU may take a second."""
        return advice(self)

    def __str__(self) -> str:
        return as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; `bytes` are the bytes that casts wrote."""
        return {
            "functions": {
                name: {**dataclasses.asdict(calls), "to": _named(calls.to)}
                for name, calls in self.functions.items()
            },
            "batches": dataclasses.asdict(self.batches),
            "bounces": [
                {"from": source, "to": target, **dataclasses.asdict(bounce)}
                for (source, target), bounce in self.bounces.items()
            ],
            "modules": {
                name: {
                    **dataclasses.asdict(use),
                    "takes": sorted(map(dtype_name, use.takes)),
                    "gives": sorted(map(dtype_name, use.gives)),
                }
                for name, use in self.modules.items()
            },
            "advice": self.advice(),
            "native_part": native.status().reason,
        }


def _named(counts: dict[torch.dtype, int]) -> dict[str, int]:
    return {dtype_name(dtype): n for dtype, n in counts.items()}


def _sizes(module: nn.Module) -> dict[str, int]:
    """The sizes of a layer that decide whether Tensor Cores are used."""
    if isinstance(module, nn.Linear):
        return {"in_features": module.in_features, "out_features": module.out_features}
    if isinstance(module, CONVOLUTIONS):
        groups = module.groups
        return {
            "in_channels": module.in_channels // groups,
            "out_channels": module.out_channels // groups,
        }
    if isinstance(module, nn.RNNBase):
        return {"input_size": module.input_size, "hidden_size": module.hidden_size}
    if isinstance(module, nn.MultiheadAttention):
        return {"embed_dim": module.embed_dim, "head_dim": module.head_dim}
    return {}
