"""The switch of the fused inference kernels of attention."""

from __future__ import annotations

import torch.backends.mha


def is_fast_path_enabled() -> bool:
    """As `torch.backends.mha.get_fastpath_enabled()`, for code that Dynamo traces.

    Where torch keeps the switch elsewhere it counts as on, as it is unless a user turned it off.
    """
    return getattr(torch.backends.mha, "_is_fastpath_enabled", True)
