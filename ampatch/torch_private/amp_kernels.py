"""torch's kernels of loss scaling."""

from __future__ import annotations

from typing import Any

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


update_scale_: Any = getattr(torch, "_amp_update_scale_", None)
"""(scale, clean, found, growth, backoff, interval): the rule of the scale, in place; None: this
torch has no such kernel.
"""
