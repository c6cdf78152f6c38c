"""torch's kernels of loss scaling; where torch lacks them, the same in public functions."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from torch import _amp_foreach_non_finite_check_and_unscale_ as check_and_unscale_
except ImportError:

    def check_and_unscale_(  # type: ignore[misc]
        grads: list[Tensor], found_inf: Tensor, inverse: Tensor
    ) -> None:
        """Multiply by `inverse`, in place; set `found_inf` to 1 where an inf or NaN was met."""
        for grad in grads:
            found_inf.logical_or_(~torch.isfinite(grad).all())
            grad.mul_(inverse)


try:
    from torch import _amp_update_scale_ as update_scale_
except ImportError:

    def update_scale_(  # type: ignore[misc]
        scale: Tensor,
        unskipped: Tensor,
        found_inf: Tensor,
        growth: float,
        backoff: float,
        interval: int,
    ) -> None:
        """Back off where `found_inf` is set; else count, and grow after `interval` steps."""
        bad = found_inf.bool()
        unskipped.add_(1).mul_((~bad).int())
        grows = unskipped >= interval
        scale.mul_(torch.where(bad, backoff, torch.where(grows, growth, 1.0)))
        unskipped.mul_((~grows).int())
