"""Gradients of biases that are zero but for rounding errors.

The bias of an attention's keys adds the same number to all scores of a row, and the softmax cancels
it; a batch norm cancels the bias before it.  Their computed gradients are rounding errors, which no
loss scale has to save.  They are recognized by their values, in any module.  With inputs x and
gradients g of the outputs, a row of a weight gets sum(g * x) over the tokens and its bias sum(g),
which is of the same size for inputs near 1.  If the g cancel, the gradient of the bias is a
rounding error, about eps times the weight's.  In 40 steps of small transformers the largest was
1.3 eps in float16, 1.8 in bfloat16 and 4 in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SMALLEST_SHARE = 2.0**-16
"""A bias's gradient that is a smaller share of its weight's is noise."""
_SEPARATE_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_RUN_LENGTH = 4  # neighbours that must be small; a single element is small by chance


def cancelled(name: str, grads: Mapping[str, Tensor], half: torch.dtype) -> Tensor | None:
    """A mask of the elements of a bias's gradient that are noise; None: none is, or it is no bias.

    `half` is the dtype in which the gradients may have been computed.
    """
    bias, row_sizes = grads[name], _row_sizes(name, grads)
    if row_sizes is None or bias.dim() != 1 or bias.shape != row_sizes.shape:
        return None
    ratio = bias.float().abs() / row_sizes
    usual = ratio.nanquantile(0.75)  # of elements that are taken for no noise
    small = ratio <= (4 * torch.finfo(half).eps * usual).clamp(min=_SMALLEST_SHARE)
    runs = small.unfold(0, min(_RUN_LENGTH, len(small)), 1).all(1)
    noise = torch.zeros_like(small)
    for start in range(len(small) - len(runs) + 1):
        noise[start : start + len(runs)] |= runs
    return noise if noise.any() else None


def _row_sizes(name: str, grads: Mapping[str, Tensor]) -> Tensor | None:
    """The size of the gradient of each row of the weight beside a bias."""
    before, is_bias, after = name.rpartition("bias")
    weights = [grads.get(f"{before}weight{after}")]
    if weights == [None]:  # nn.MultiheadAttention whose keys have another size
        before = before.removesuffix("in_proj_")
        weights = [grads.get(f"{before}{suffix}") for suffix in _SEPARATE_WEIGHTS]
    if not is_bias or any(w is None or w.is_sparse or w.dim() < 2 for w in weights):
        return None
    matrices = [weight.float().flatten(1) for weight in weights if weight is not None]
    if len(matrices) == 1 and len(matrices[0]) != len(grads[name]):  # Conv1D has inputs by outputs
        matrices = [matrices[0].t()]
    return torch.cat([matrix.square().mean(1).sqrt() for matrix in matrices])
