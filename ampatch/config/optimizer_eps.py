"""The eps of Adam and similar optimizers with half weights, where torch's default may be 0.

These optimizers divide by sqrt(v) + eps in the dtype of the weights.  float16's smallest number is
2^-24, so the default 1e-8 is 0.  The v of a first step is 0.001 g^2, which is 0 too for |g| below
sqrt(2^-25 / 0.001) = 5.5e-3.  Then g is divided by 0.
"""

from __future__ import annotations

from typing import Any

import torch

from .opt_levels import HALF_DTYPES

HALF_EPS = 1e-3
"""The eps for half weights: the largest gradient whose v is 0 then moves its weight by 5.5 times
the learning rate.  With 1e-4 it is 55 times (docs/accuracy.md has a training that shows it).
"""


def lost_eps(optimizer: Any) -> str | None:
    """A warning if the optimizer's eps is 0 in the dtype of the weights, else None.

    Fused Adam gets no warning, because the kernels compute in FP32.
    """
    for group in optimizer.param_groups:
        eps = group.get("eps")
        is_fused = group.get("fused") and isinstance(optimizer, torch.optim.Adam)
        if not isinstance(eps, float) or eps <= 0 or is_fused:
            continue
        for dtype in {param.dtype for param in group["params"] if param.requires_grad}:
            if dtype in HALF_DTYPES and not torch.tensor(eps, dtype=dtype):
                return (
                    f"{type(optimizer).__name__}: eps={eps:g} is 0 in {dtype}, the dtype of its "
                    "weights: a small gradient is divided by 0, and the weights become NaN. Make "
                    f'the optimizer with eps={HALF_EPS:g}, or take opt_level="O2" with master '
                    "weights, which are FP32."
                )
    return None
