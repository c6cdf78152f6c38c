"""apex's compiled norms and softmaxes, forward and backward, with apex's order of arguments.

Programs call them in autograd Functions of their own.  They compute in FP32 and round once.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _rows(x: Tensor, shape: Any) -> Tensor:
    """`x` as an FP32 matrix, whose rows are normalized."""
    return x.float().reshape(-1, math.prod(shape))


@torch.no_grad()
def _norm(is_rms: bool, is_mixed: bool, x: Tensor, shape: Any, *rest: Any) -> list[Tensor]:
    """`(x, shape, weight, bias, eps)` to `[output, mean, invvar]`; RMS has no bias and no mean.

    Statistics are FP32, one per row.  The output has the dtype of `x`, or of the weight if mixed.
    """
    *affine, eps = rest
    rows = _rows(x, shape)
    mean = rows.mean(1, keepdim=True)
    centered = rows if is_rms else rows - mean
    invvar = (centered.square().mean(1, keepdim=True) + eps).rsqrt()
    out = centered * invvar
    for combine, param in zip((torch.mul, torch.add), affine):
        out = combine(out, param.float().reshape(-1))
    out = out.to(affine[0].dtype if is_mixed else x.dtype).view_as(x)
    return [out, *(statistic.view(-1) for statistic in (mean, invvar)[is_rms:])]


@torch.no_grad()
def _norm_backward(is_rms: bool, count: int, grad: Tensor, *rest: Any) -> Any:
    """`(grad, mean, invvar, x, shape, weight, bias, eps)` to the gradients of `x`, weight and bias.

    RMS has no mean.  `count`: number of parameters.  If eps is followed by True, `x` is the output.
    """
    mean, invvar, x, shape, *rest = (None, *rest) if is_rms else rest
    params, (eps, *is_output) = rest[:count], rest[count:]
    weight, bias, *_ = *(param.float().reshape(-1) for param in params), None, None
    rows, grads, invvar = _rows(x, shape), _rows(grad, shape), invvar.reshape(-1, 1)
    if not any(is_output):
        rows = (rows if mean is None else rows - mean.reshape(-1, 1)) * invvar
    elif weight is not None:
        rows = rows if bias is None else rows - bias
        rows = rows / weight.abs().clamp(min=eps).copysign(weight)
    inner = grads if weight is None else grads * weight
    projected = inner - rows * (inner * rows).mean(1, keepdim=True)
    projected = projected if is_rms else projected - inner.mean(1, keepdim=True)
    x_grad = (projected * invvar).to(x.dtype).view_as(x)
    sums = ((grads * rows).sum(0), grads.sum(0))
    param_grads = [total.to(param.dtype).view_as(param) for total, param in zip(sums, params)]
    return [x_grad, *param_grads] if count else x_grad


LAYER_NORM: dict[str, Any] = {}
for _rms in ("", "rms_"):
    for _name in ("forward", "forward_affine", "forward_affine_mixed_dtypes"):
        LAYER_NORM[_rms + _name] = partial(_norm, bool(_rms), "mixed" in _name)
    for _name, _count in (("backward", 0), ("backward_affine", 1 if _rms else 2)):
        LAYER_NORM[_rms + _name] = partial(_norm_backward, bool(_rms), _count)
MIXED_LAYER_NORM = {  # before apex had these in one module
    "forward_affine": LAYER_NORM["forward_affine_mixed_dtypes"],
    "backward_affine": LAYER_NORM["backward_affine"],
}


@torch.no_grad()
def _softmax(is_causal: bool, x: Tensor, *rest: Any) -> Tensor:
    """`(x, mask, scale)`: softmax of `x * scale` in the last dimension, in the dtype of `x`.

    Masked elements (mask not 0, or above the diagonal) are 0, also if all of a row is masked.
    """
    *masks, scale = rest
    scores = x.float() * scale
    if is_causal:
        masks = [torch.ones(x.shape[-2:], device=x.device).triu(1)]
    if not masks:
        return scores.softmax(-1).to(x.dtype)
    hidden = masks[0].bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0).to(x.dtype)


@torch.no_grad()
def _softmax_backward(grad: Tensor, output: Tensor, scale: float) -> Tensor:
    inner = grad.float() * output
    return ((inner - output * inner.sum(-1, keepdim=True)) * scale).to(output.dtype)


SOFTMAX = {"forward": partial(_softmax, False), "backward": _softmax_backward}
CAUSAL_SOFTMAX = {**SOFTMAX, "forward": partial(_softmax, True)}
# Programs use the kernel only if the number of rows that it takes at once divides their batch.
MASKED_SOFTMAX = {**SOFTMAX, "get_batch_per_block": lambda queries, keys, batches, heads: 1}
