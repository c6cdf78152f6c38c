"""torch's kernels of loss scaling."""

from __future__ import annotations

import torch
from torch import Tensor

from .lookup import of_torch


def _one_by_one(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    for grad in grads:
        found_inf.logical_or_(~torch.isfinite(grad).all())
        grad.mul_(inverse)


check_and_unscale_ = of_torch("torch._amp_foreach_non_finite_check_and_unscale_", _one_by_one)
"""(grads, found_inf, inverse): multiply by `inverse`, in place; set `found_inf` to 1 where an inf
or NaN was met.
"""

update_scale_ = of_torch("torch._amp_update_scale_", None)
"""(scale, clean, found, growth, backoff, interval): the rule of the scale, in place; None: this
torch has no such kernel.
"""
