"""Unscales, multiplies and adds lists of gradients, in few kernels."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.opt_levels import HALF_DTYPES
from ..native import part
from ..torch_private import foreach
from ..torch_private.amp_kernels import check_and_unscale_
from ..torch_private.devices import can_read_without_sync
from ..torch_private.dtensors import are_laid_out_alike, local_of
from .scale_value import OverflowFlag

_dtype, _is_cpu, _is_sparse = map(operator.attrgetter, ("dtype", "is_cpu", "is_sparse"))
_HALF_DTYPES = frozenset(HALF_DTYPES)
_COMPLEX_DTYPES = frozenset((torch.complex32, torch.complex64, torch.complex128))
_unscale = None if part is None else part.unscale
_reciprocal = torch.ops.aten.reciprocal.default
"""Not `torch.reciprocal`, which is patched: cast reports count its calls as calls of the script."""


def unscale_(grads: list[Tensor], scale: Tensor, *, as_bool: bool) -> OverflowFlag:
    """Divide gradients by `scale` (0-dim), in place; returns whether they had an inf or NaN.

    `as_bool`: returns a `bool`, which synchronizes with the device; else a 0-dim FP32 tensor on the
    device of `scale`.

    In C++: `unscale` of `gradients.h`.
    """
    if as_bool and _unscale is not None and (found_inf := _unscale(grads, scale)) is not None:
        return found_inf
    inverse = _reciprocal(scale)
    found_inf = torch.zeros_like(scale)
    for device, group in _kernel_groups(grads):
        local = found_inf if device == scale.device else torch.zeros_like(scale, device=device)
        check_and_unscale_(group, local, inverse.to(device))
        if local is not found_inf:
            found_inf = torch.maximum(found_inf, local.to(scale.device))
    return found_inf.tolist() != 0 if as_bool else found_inf


def multiply_(grads: list[Tensor], factor: Any) -> None:
    """Multiply gradients by a number or a 0-dim tensor, in place.

    On the CPU torch rounds a number to the dtype of the list, and 65536 would be inf in float16.
    So half gradients are multiplied by a tensor, which keeps its dtype.
    """
    for device, group in _kernel_groups(grads):
        if isinstance(factor, Tensor):
            foreach.mul_(group, factor.to(device))
        elif can_read_without_sync(device) and not _HALF_DTYPES.isdisjoint(map(_dtype, group)):
            foreach.mul_(group, torch.tensor(factor, dtype=torch.float64, device=device))
        else:
            foreach.mul_(group, factor)


def add_back(saved: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors their saved gradients back, plus the gradients that they have now."""
    earlier: list[Tensor] = []
    more: list[Tensor] = []
    for tensor, grad in saved:
        new = tensor.grad
        if new is None:
            tensor.grad = grad
        elif are_laid_out_alike(grad, new) and not grad.is_conj():  # `foreach.add_` can add these
            earlier.append(local_of(grad))
            more.append(local_of(new))
            tensor.grad = grad
        else:
            tensor.grad = grad + new
    if earlier:
        foreach.add_(earlier, more)


def _kernel_groups(grads: list[Tensor]) -> list[tuple[torch.device, list[Tensor]]]:
    """The `real_values` of gradients, in lists for one kernel each, with the list's device."""
    if (
        set(map(type, grads)) == {Tensor}
        and (len(grads) == 1 or all(map(_is_cpu, grads)))
        and not any(map(_is_sparse, grads))
        and _COMPLEX_DTYPES.isdisjoint(map(_dtype, grads))
    ):  # the usual case, without a Python loop
        return [(grads[0].device, grads)]
    groups: dict[tuple[torch.device, type], list[Tensor]] = {}
    for grad in map(real_values, grads):
        groups.setdefault((grad.device, type(grad)), []).append(grad)
    return [(device, group) for (device, _), group in groups.items()]


def real_values(grad: Tensor) -> Tensor:
    """The values of a gradient as a plain real tensor that shares its memory.

    Of a sparse gradient these are its `_values()`, of a DTensor the local tensor.  Complex values
    are viewed as real numbers.
    """
    grad = local_of(grad)
    grad = grad._values() if grad.is_sparse else grad
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
