"""The magnitude of an operator's result in float64, which tells overflows from true inf and NaN.

An overflow of float16 is finite in float64, and a smaller loss scale cures it.  A division by zero
or the square root of a negative number is finite in no dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ampatch.torch_private import custom_ops

_WIDER_DTYPES = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}


def max_in_float64(func: Any, args: tuple, kwargs: dict) -> float | None:
    """The largest absolute value of `func(*args, **kwargs)`, computed in float64.

    Returns inf if the result is not finite in float64 either.  Returns None if it cannot be
    computed again: the operator writes into its arguments, draws random numbers, is not torch's own
    or has no float64.
    """
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if custom_ops.is_mutable(func):
        return None
    try:
        result = func(*_to_float64(args), **_to_float64(kwargs))
    except (RuntimeError, TypeError):  # no float64 here; NotImplementedError is a RuntimeError
        return None
    items = result if isinstance(result, (list, tuple)) else [result]
    return max(map(_largest, filter(torch.is_tensor, items)), default=0.0)


def _to_float64(value: Any) -> Any:
    """The arguments in float64 or complex128."""
    if isinstance(value, Tensor):
        return value.to(_WIDER_DTYPES.get(value.dtype, value.dtype))
    if isinstance(value, torch.dtype):
        return _WIDER_DTYPES.get(value, value)
    if isinstance(value, (list, tuple)):
        return [_to_float64(item) for item in value]
    if isinstance(value, dict):
        return {name: _to_float64(item) for name, item in value.items()}
    return value


def _largest(tensor: Tensor) -> float:
    is_checked = tensor.is_floating_point() or tensor.is_complex()
    value = tensor.abs().max().item() if is_checked and tensor.numel() else 0.0
    return math.inf if math.isnan(value) else value
