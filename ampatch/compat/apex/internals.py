"""What scripts import from modules that were apex's own business."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...session import facade as engine
from .state import _amp_state

__all__ = ["applier", "check_models", "check_optimizers", "check_params_fp32", "to_type"]


class AmpModule(ModuleType):
    """`apex.amp.amp`, whose `_DECORATOR_HANDLE` is the handle in force, or None."""

    @property
    def _DECORATOR_HANDLE(self) -> Any:  # apex's name
        return _amp_state.handle if engine.open_sessions() else None

    @_DECORATOR_HANDLE.setter
    def _DECORATOR_HANDLE(self, value: Any) -> None:
        """Scripts set it to None to start anew, which every `initialize` does anyway."""


def to_type(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """A floating tensor in `dtype`; others as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def applier(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """`value` with `fn` applied to each tensor in it, in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return type(value)({key: applier(item, fn) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(applier(item, fn) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(applier(item, fn) for item in value)
    return value


def check_params_fp32(models: Iterable[nn.Module]) -> None:
    """apex refused models that were half already; they are welcome here."""


def check_models(models: Iterable[nn.Module]) -> None:
    """`initialize` checks its models."""


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """`initialize` checks its optimizers."""
