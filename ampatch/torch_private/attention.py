"""The switch of the fused inference kernels of attention, and what they cannot do."""

from __future__ import annotations

import torch.backends.mha
from torch.autograd import forward_ad


def is_fast_path_enabled() -> bool:
    """As `torch.backends.mha.get_fastpath_enabled()`, for code that Dynamo traces.

    Where torch keeps the switch elsewhere it counts as on, as it is unless a user turned it off.
    """
    return getattr(torch.backends.mha, "_is_fastpath_enabled", True)


def is_forward_ad_on() -> bool:
    """Whether tensors may have tangents, for which the kernels have no formula.

    Where torch keeps the level elsewhere: yes, since it cannot be known.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0
