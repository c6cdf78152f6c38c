"""How a dynamic loss scale and its growth tracker change with a step; overflow flags.

An overflow flag, `found_inf`, is a `bool` if the host knows the result, else a 0-dim FP32 tensor
that is not 0 after an overflow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config.scale_settings import ScaleSettings
from ..torch_private.amp_kernels import update_scale_

OverflowFlag = Tensor | bool

_LARGEST_FLOAT32 = 3.4028234663852886e38


def next_scale(
    scale: Any, tracker: Any, found_inf: Any, settings: ScaleSettings
) -> tuple[Any, Any]:
    """The scale and `tracker`, the count of clean steps, after a step; numbers or FP64 tensors.

    Section 3.2 of Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740): back off
    after an overflow (`found_inf`, 1 or 0), grow after `growth_interval` clean steps, unless FP32
    could not hold the new scale.  `update_scale_` is torch's kernel for the same rule.
    """
    is_clean = 1 - found_inf
    tracker = (tracker + 1) * is_clean
    can_grow = scale * settings.growth_factor <= _LARGEST_FLOAT32
    grows = is_clean * (tracker == settings.growth_interval) * can_grow
    scale = scale * settings.backoff_factor**found_inf * settings.growth_factor**grows
    return scale, tracker % settings.growth_interval


def update_(
    scale: Tensor, tracker: Tensor, found_inf: OverflowFlag, settings: ScaleSettings
) -> None:
    """`next_scale` in place, for 0-dim tensors (FP32, int32).  Does not synchronize."""
    if not isinstance(found_inf, Tensor):
        found_inf = torch.full_like(scale, float(found_inf))
    found_inf = found_inf.to(scale.device)
    if update_scale_ is None:
        new_scale, new_tracker = next_scale(scale.double(), tracker, found_inf.double(), settings)
        scale.copy_(new_scale)
        tracker.copy_(new_tracker)
    else:
        factors = settings.growth_factor, settings.backoff_factor
        update_scale_(scale, tracker, found_inf, *factors, settings.growth_interval)


def combine_flags(first: OverflowFlag, second: OverflowFlag) -> OverflowFlag:
    """A flag that is set if `first` or `second` is set."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.maximum(first, second.to(first.device))
    if isinstance(first, Tensor):
        return torch.ones_like(first) if second else first
    if isinstance(second, Tensor):
        return torch.ones_like(second) if first else second
    return first or second


def is_set(flag: OverflowFlag) -> bool:
    """Whether the flag is set.  Synchronizes with the device if the flag is a tensor."""
    return flag if isinstance(flag, bool) else bool(flag.item())
