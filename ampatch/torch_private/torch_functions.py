"""`__torch_function__`: torch's stack of TorchFunctionModes, and its caches of functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.overrides
from torch.overrides import has_torch_function

from .torch_attributes import torch_attribute

try:
    from torch._C import _is_torch_function_mode_enabled as is_torch_function_mode_enabled
    from torch.overrides import _get_overloaded_args as overloaded_args
    from torch.overrides import _len_torch_function_stack as torch_function_stack_len
    from torch.overrides import _pop_mode as pop_torch_function_mode
    from torch.overrides import _push_mode as push_torch_function_mode
except ImportError:  # this torch cannot report its modes: handlers get the original and see casts

    def is_torch_function_mode_enabled() -> bool:
        """No mode is known."""
        return False

    def torch_function_stack_len() -> int:
        """No mode is known."""
        return 0

    def pop_torch_function_mode() -> Any:
        """Not called, nor is `push_torch_function_mode`: no mode is known."""
        raise NotImplementedError("no mode is known")

    push_torch_function_mode = pop_torch_function_mode  # type: ignore[assignment]

    def overloaded_args(relevant: Iterable) -> list:  # type: ignore[misc]
        """One argument of each class that handles torch's calls."""
        handled = [value for value in relevant if has_torch_function((value,))]
        return list({type(value): value for value in handled}.values())


STACK_CHANGES = [
    (owner, name)
    for owner in (torch.overrides, torch_attribute("torch.utils._device", None))
    for name in ("_push_mode", "_pop_mode")
    if hasattr(owner, name)
]
"""The functions with which torch changes its stack of modes.  Without them, no mode is known."""

CACHED_OVERRIDE_FUNCTIONS = [
    name
    for name in (
        "get_ignored_functions",
        "get_testing_overrides",
        "_get_overridable_functions",
        "_get_tensor_methods",
    )
    if hasattr(getattr(torch.overrides, name, None), "cache_clear")
]
"""Names of the functions of `torch.overrides` that cache tables of overridable functions."""

no_torch_function = torch_attribute("torch._C.DisableTorchFunctionSubclass", contextlib.nullcontext)
"""Context manager that disables `__torch_function__` of subclasses.

If this torch lacks `DisableTorchFunctionSubclass`, it does nothing.
"""

C_NN_NAME = "_nn"
C_NN = torch_attribute("torch._C._nn", None)
"""`torch._C._nn`, which implements some functions of `torch.nn.functional`, and its last name."""

NESTED_TENSORS = "torch.nested._internal.nested_tensor"
"""The module of torch's class of nested tensors."""


def original_of_matmul() -> Any:
    """The function that handlers get for the operator `@`: the inherited `torch.Tensor.matmul`."""
    return torch.Tensor.__base__.matmul  # type: ignore[union-attr]


builtin_table = torch_attribute("torch.jit._builtins._get_builtin_table", dict)
"""Returns torch.jit's table of builtins.  Without it, scripting a patched function fails."""
