"""torch's kernels of loss scaling."""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_attributes import torch_attribute


def _unscale_each(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    for grad in grads:
        found_inf.logical_or_(~torch.isfinite(grad).all())
        grad.mul_(inverse)


unscale_kernel = torch_attribute("torch._amp_foreach_non_finite_check_and_unscale_", _unscale_each)


def check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply gradients of one device by `inverse`, in place.  An inf or NaN sets `found_inf`.

    torch's kernel supports bfloat16 on the CPU, but not on CUDA.
    """
    if not found_inf.is_cpu:
        bfloat16_grads = [grad for grad in grads if grad.dtype is torch.bfloat16]
        if bfloat16_grads:
            _unscale_each(bfloat16_grads, found_inf, inverse)
            grads = [grad for grad in grads if grad.dtype is not torch.bfloat16]
    if grads:
        unscale_kernel(grads, found_inf, inverse)


update_scale_ = torch_attribute("torch._amp_update_scale_", None)
"""(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval): updates scale
and tracker in place.  None if this torch has no such kernel.
"""
