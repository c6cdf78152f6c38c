"""Names for annotations of code that calls ampatch.

    from ampatch.types import OptLevel

    def prepare(model: nn.Module, opt_level: OptLevel) -> nn.Module: ...

This module has types only.  The functions check their arguments themselves, and accept more than a
type checker: opt levels as `"o1"`, numbers as strings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OptLevel = Literal["O0", "O1", "O2", "O3", "O4", "O5"]
HalfName = Literal["float16", "fp16", "half", "bfloat16", "bf16"]
DtypeName = HalfName | Literal["float32", "fp32", "float"]
Precision = Literal["float", "half"]
StopAt = Literal["unabsorbed", "any"]
Overrides = (
    Mapping[str | type[nn.Module] | Callable[..., object], Precision] | str | os.PathLike[str]
)
"""By module or function; or JSON text, or the path of a JSON file."""


class Optimizer(Protocol):
    """An object that the functions of ampatch accept as an optimizer: torch's, LARC and others."""

    @property
    def param_groups(self) -> Iterable[Mapping[str, Any]]:
        """Mappings with the tensors of the group under "params"."""

    @property
    def step(self) -> Callable[..., object]:
        """Updates the parameters."""


class StandIn(Protocol):
    """A framework's object that stands for an optimizer (Lightning's, Fabric's)."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that it stands for."""

    def step(self, closure: Callable[[], Any] | None = None) -> object:
        """Updates the parameters."""


Owner = ModuleType | type[object] | str
"""The module or class of a registered function; a string is its dotted name."""
AnyOptimizer = Optimizer | StandIn
Model = TypeVar("Model", bound=nn.Module)
Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
"""`initialize` returns the type of its argument: one model, or a list or tuple of models."""
Optimizers = TypeVar("Optimizers", bound=AnyOptimizer | Sequence[AnyOptimizer])
Called = TypeVar("Called", bound=Callable[..., object])
Function = TypeVar("Function", bound="Callable[..., object] | classmethod[Any, Any, Any]")
"""The type of a decorator's argument and result."""


class ScaleRule(TypedDict, total=False):
    """Settings of a dynamic loss scale."""

    init_scale: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float


class ScaleSettings(ScaleRule, total=False):
    """The keywords of `set_loss_scale_settings`."""

    min_loss_scale: float
    max_loss_scale: float


class ApexSettings(TypedDict, total=False):
    """The settings of `initialize` that apex had, without those that its overloads have."""

    cast_model_type: torch.dtype | DtypeName | Literal[False] | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | Literal["True", "False"] | None
    master_weights: bool | None
    loss_scale: float | str | None
    cast_model_outputs: torch.dtype | DtypeName | None
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float


class Settings(ApexSettings, ScaleRule, total=False):
    """The keywords of `initialize` without `enabled`, `opt_level`, `num_losses` and `dtype`."""

    overrides: Overrides | None
    max_consecutive_skips: int
    allow_banned: bool
    process_group: ProcessGroup | None
    patch_scope: Literal["model", "process"]


class PluginSettings(Settings, total=False):
    """The keywords of Lightning's plugins without `opt_level` and `dtype`."""

    enabled: bool
