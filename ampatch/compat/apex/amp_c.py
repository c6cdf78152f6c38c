"""amp_C, apex_C and fused_adam_cuda: apex's functions on tensors, which scripts call directly.

amp_C's functions compute in FP32 and round once.  They ignore `chunk_size`.  Norms and scaling set
`noop_flag` to 1 if they meet an inf or NaN, without a synchronization with the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampatch.torch_private import foreach


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float
) -> None:
    """Set `out = inputs * scale` for the two lists `[inputs, out]`."""
    inputs, out = tensor_lists
    nonempty = [tensor for tensor in inputs if tensor.numel()]
    if nonempty:
        largest = torch.stack([norm.float() for norm in foreach.norm(nonempty, float("inf"))])
        noop_flag.masked_fill_((~largest.isfinite().all()).to(noop_flag.device), 1)
    if out:
        foreach.copy_(out, foreach.mul(_to_fp32(inputs), scale))


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[list[Tensor]],
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """The norm of all elements of `[tensors]`, and with `per_tensor` the norm of each tensor."""
    (tensors,) = tensor_lists
    if not tensors:
        return torch.zeros(1, device=noop_flag.device), torch.zeros(0, device=noop_flag.device)
    norms = torch.stack(list(foreach.norm(_to_fp32(tensors))))
    norm = torch.linalg.vector_norm(norms).reshape(1)
    noop_flag.masked_fill_(~norm.isfinite().all(), 1)
    return norm, norms if per_tensor else norms[:0]


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Sequence[list[Tensor]], *options: float
) -> None:
    """A step of Adam (mode 0) or AdamW (1) on `[grads, params, exp_avg, exp_avg_sq]`.

    The options are lr, beta1, beta2, eps, step, mode, bias_correction and weight_decay.
    """
    grads, params, exp_avg, exp_avg_sq = tensor_lists
    lr, beta1, beta2, eps, step, mode, bias_correction, decay = map(float, options)
    grads, params32 = _to_fp32(grads), _to_fp32(params)
    if not params:
        return
    if mode == 1:
        foreach.mul_(params32, 1 - lr * decay)
    elif decay:
        grads = foreach.add(grads, params32, alpha=decay)
    foreach.lerp_(exp_avg, grads, 1 - beta1)
    foreach.mul_(exp_avg_sq, beta2)
    foreach.addcmul_(exp_avg_sq, grads, grads, value=1 - beta2)
    divisor = foreach.sqrt(exp_avg_sq)
    if bias_correction:
        foreach.mul_(divisor, (1 - beta2**step) ** -0.5)
        lr /= 1 - beta1**step
    foreach.add_(divisor, eps)
    foreach.addcdiv_(params32, exp_avg, divisor, value=-lr)
    if params32[0] is not params[0]:
        foreach.copy_(params, params32)


@torch.no_grad()
def adam(
    param: Tensor, copy: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, *options: float
) -> None:
    """fused_adam_cuda's step, in place.  A `copy` that is not empty gets the new `param` too.

    The options are lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction and weight_decay.
    The divisor is `sqrt(exp_avg_sq + eps)` in mode 0 and `sqrt(exp_avg_sq) + eps` in mode 1,
    without a correction for the bias.
    """
    lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay = map(float, options)
    grad = grad.float() / grad_scale
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    divisor = (exp_avg_sq + eps).sqrt() if mode == 0 else exp_avg_sq.sqrt() + eps
    if bias_correction:
        lr *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    param.sub_(lr * (exp_avg / divisor + decay * param))
    if copy.numel():
        copy.copy_(param)


def _to_fp32(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of tensors of one dtype as one 1-dim tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` with the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
