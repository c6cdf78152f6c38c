"""FusedNovoGrad, after Ginsburg et al. 2019 (arXiv 1905.11286), with apex's options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import ApexOptimizer, params_with_grads, refuse

__all__ = ["FusedNovoGrad"]


class FusedNovoGrad(ApexOptimizer, torch.optim.Optimizer):
    """Adam with one second moment for each tensor: a running norm of its gradient.

    Args:
        params: parameters or groups.
        lr, betas, eps, bias_correction: as in Adam.
        weight_decay: added to the update, or with `reg_inside_moment` before the first moment.
        grad_averaging: whether the first moment gets new gradients times 1 - beta1, or times 1.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: start the running norm from 0, not from the norm of the first gradient.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, reg_inside_moment: bool = False, grad_averaging: bool = True,
        norm_type: int = 2, init_zero: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        if norm_type not in (0, 2):
            refuse("FusedNovoGrad", f"norm_type={norm_type}", "0 (largest value) or 2")
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "grad_averaging": grad_averaging,
            "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, set_grad_none, refused={"amsgrad": amsgrad}, defaults=defaults)
        self.reg_inside_moment = reg_inside_moment

    def _from_apex(self, group: dict[str, Any], state: dict[Any, dict]) -> None:
        """Move the running norms, which apex keeps in the group, one tensor per dtype."""
        norms = [norm for norm in group.pop("exp_avg_sq", []) if norm.numel()]
        if not norms:
            return
        if len(norms) > 1 or norms[0].numel() != len(group["params"]):
            raise ValueError(
                "FusedNovoGrad.load_state_dict(state_dict): the running norms of this checkpoint "
                "cannot be told apart. Expected one for each parameter, all of one dtype, as "
                "apex saves them at O1 and O2."
            )
        for key, value in zip(group["params"], norms[0].reshape(-1), strict=True):
            state.setdefault(key, {})["exp_avg_sq"] = value.clone()

    def _update(self) -> None:
        for group in self.param_groups:
            params = params_with_grads(group)
            if params:
                group["step"] = group.get("step", 0) + 1
            for param in params:
                self._update_tensor(param, group)

    def _update_tensor(self, param: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), step, decay = group["betas"], group["step"], group["weight_decay"]
        corrected = group["bias_correction"]
        norm = self._running_norm(param, group)
        divisor = norm / (1 - beta2**step) ** 0.5 if corrected else norm
        divisor = divisor + group["eps"]
        weight = 1 - beta1 if group["grad_averaging"] else 1.0
        first = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        correction = 1 - beta1**step if corrected else 1.0
        if self.reg_inside_moment:
            first.mul_(beta1).add_(param.grad / divisor + decay * param, alpha=weight)
            update = first / correction
        else:
            first.mul_(beta1).add_(param.grad, alpha=weight)
            update = first / correction / divisor + decay * param
        param.sub_(group["lr"] * update)

    def _running_norm(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Update and return the second moment, which is a norm, not its square."""
        infinite = group["norm_type"] == 0
        norm = torch.linalg.vector_norm(param.grad, float("inf") if infinite else 2)
        state, beta2 = self.state[param], group["betas"][1]
        previous = state.get("exp_avg_sq")
        if previous is None:
            previous = torch.zeros_like(norm) if group["init_zero"] else norm
        if infinite:
            updated = beta2 * previous + (1 - beta2) * norm
        else:
            updated = (beta2 * previous.square() + (1 - beta2) * norm.square()).sqrt()
        state["exp_avg_sq"] = updated
        return updated
