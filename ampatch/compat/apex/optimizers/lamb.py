"""FusedLAMB, after You et al. 2019 (arXiv 1904.00962), with apex's options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampatch.config.opt_levels import HALF_DTYPES
from ampatch.torch_private import foreach

from .common import ApexOptimizer, params_with_grads, refuse

__all__ = ["FusedLAMB", "FusedMixedPrecisionLamb"]


class FusedLAMB(ApexOptimizer, torch.optim.Optimizer):
    """Adam with each tensor's update scaled to the norm of the tensor, times the learning rate.

    Args:
        params: parameters or groups.
        lr, betas, eps, bias_correction: as in Adam.
        weight_decay: added to the update (`adam_w_mode=True`), or to the gradient.
        grad_averaging: whether the first moment gets new gradients times 1 - beta1, or times 1.
        max_grad_norm: all gradients together are clipped to this norm; 0 turns it off.
        use_nvlamb: rescale tensors without weight decay too.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
        amsgrad: bool = False, adam_w_mode: bool = True, grad_averaging: bool = True,
        set_grad_none: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, set_grad_none, refused={"amsgrad": amsgrad}, defaults=defaults)
        self.adam_w_mode = int(adam_w_mode)
        self.use_nvlamb = use_nvlamb

    def _update(self) -> None:
        grads = [param.grad for group in self.param_groups for param in params_with_grads(group)]
        if not grads:
            return
        norms = foreach.norm(grads)
        total = torch.linalg.vector_norm(
            torch.stack([norm.float().to(norms[0].device) for norm in norms])
        )
        for group in self.param_groups:
            self._update_group(group, total)

    def _update_group(self, group: dict[str, Any], total: Tensor) -> None:
        params = params_with_grads(group)
        if not params:
            return
        group["step"] = group.get("step", 0) + 1
        limit, decay, lr = group["max_grad_norm"], group["weight_decay"], group["lr"]
        clip = (total / limit).clamp(min=1.0) if limit and limit > 0 else None
        for param in params:
            grad = param.grad if clip is None else param.grad / clip.to(param.grad.device)
            if decay and not self.adam_w_mode:
                grad = grad + decay * param
            update = self._adam_update(param, grad, group)
            if decay and self.adam_w_mode:
                update = update + decay * param
            if decay or self.use_nvlamb:
                update = update * _trust_ratio(param, update)
            param.sub_(lr * update)

    def _adam_update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        first.mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if not group["bias_correction"]:
            return first / (second.sqrt() + group["eps"])
        step = group["step"]
        divisor = (second / (1 - beta2**step)).sqrt() + group["eps"]
        return first / (1 - beta1**step) / divisor


def _trust_ratio(param: Tensor, update: Tensor) -> Tensor:
    """|param| / |update|, or 1 if one of them is zero.  Does not synchronize with the device."""
    size, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
    return torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` of FP32 parameters, with an initial step count `step`.

    Raises `RuntimeError` for half parameters, of which apex kept FP32 copies.
    """

    def __init__(self, params: Any, lr: Any = 1e-3, step: int = 0, **options: Any) -> None:
        options.pop("reduced_precision_dtype", None)
        super().__init__(params, lr, **options)
        for group in self.param_groups:
            group["step"] = int(step)
            if not set(HALF_DTYPES).isdisjoint(param.dtype for param in group["params"]):
                instead = "FP32 parameters, and amp.initialize at O2"
                refuse("FusedMixedPrecisionLamb", "params=<half parameters>", instead)
