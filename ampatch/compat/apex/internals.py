"""Names that scripts import from apex's internal modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...session import facade
from .state import handle_of

__all__ = ["applier", "check_models", "check_optimizers", "check_params_fp32", "to_type"]


class AmpModule(ModuleType):
    """`apex.amp.amp`, whose `_DECORATOR_HANDLE` is the active handle, or None."""

    @property
    def _DECORATOR_HANDLE(self) -> Any:  # apex's name
        sessions = facade.open_sessions()
        return handle_of(sessions[-1]) if sessions else None

    @_DECORATOR_HANDLE.setter
    def _DECORATOR_HANDLE(self, value: Any) -> None:
        """Accepts the None that scripts set to start again; every `initialize` starts again."""


def to_type(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """A floating tensor in `dtype`; other tensors unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def applier(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """`value` with `fn` applied to each tensor in it, in lists, tuples and mappings."""
    return facade.map_tensors(value, fn)


def check_models(models: Iterable[Any]) -> None:
    """Does nothing: `initialize` checks what it is given, and accepts half models."""


check_optimizers = check_params_fp32 = check_models
