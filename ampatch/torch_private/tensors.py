"""torch's private attributes of tensors: hooks, bases of views, storages."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")

TENSOR_HOOKS_CAN_BE_SEEN = all(hasattr(Tensor, name) for name in _HOOK_ATTRIBUTES)
"""If False, no weights are cast together: a shared node would call the hooks of all of them."""


def _no_hooks(tensor: Tensor) -> Any:
    return ()


hooks_of: Callable[[Tensor], Any] = _no_hooks
"""A tensor's backward hooks and post-accumulate-grad hooks."""

if TENSOR_HOOKS_CAN_BE_SEEN:
    hooks_of = operator.attrgetter(*_HOOK_ATTRIBUTES)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which `tensor` is a view, or None if torch knows of none."""
    return getattr(tensor, "_base", None)


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that is equal for storages of the same memory while one of them exists."""
    return getattr(storage, "_cdata", None) or storage.data_ptr()


def keeps_parameter(tensor: Tensor, data: Tensor) -> bool:
    """Whether `Module.to` keeps the parameter `tensor` when its data becomes `data`.

    Between the CPU and some accelerators `Module.to` makes new parameters, unless it swaps them.
    """
    compatible = getattr(torch, "_has_compatible_shallow_copy_type", None)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    return compatible is None or swaps or compatible(tensor, data)
