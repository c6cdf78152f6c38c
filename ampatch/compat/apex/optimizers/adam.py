"""FusedAdam: torch's Adam with apex's defaults and apex's further options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..amp_c import multi_tensor_adam
from .common import ApexOptimizer, copy_steps_to_params, params_with_grads, refuse

__all__ = ["FusedAdam"]

_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class FusedAdam(ApexOptimizer, torch.optim.Adam):
    """Adam with decoupled weight decay, like `torch.optim.AdamW`, unless `adam_w_mode=False`.

    The default weight decay is apex's 0.  With `bias_correction=False` (an option
    of parameter groups too) the moments are not corrected.  `capturable` and
    `master_weights` are accepted and have no effect; at O2 the weights are FP32.

    With `max_grad_norm`, of apex's first version, a step clips the gradients of each group to
    this norm before it uses them.  `step(grads=...)` of that version is refused.
    """

    multi_tensor_adam = staticmethod(multi_tensor_adam)  # subclasses call it

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
        capturable: bool = False, master_weights: bool = False, *, max_grad_norm: float = 0.0,
        eps_inside_sqrt: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, set_grad_none, may_fuse=True,
            refused={"amsgrad": amsgrad, "eps_inside_sqrt": eps_inside_sqrt},
            lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )  # fmt: skip
        self.adam_w_mode = int(adam_w_mode)
        self.max_grad_norm = max_grad_norm
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
        self._update_kernel_support()

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        """An argument for `multi_tensor_adam`, which ignores it."""
        return torch.zeros(1, dtype=torch.int, device=self.param_groups[0]["params"][0].device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's.  `bias_correction` may differ from group to group."""
        super().add_param_group(param_group)
        self._update_kernel_support()

    def _update_kernel_support(self) -> None:
        """Let the step get scaled gradients only if torch's fused kernel does it.

        The code in this class does not read `found_inf`, and clips unscaled gradients only.
        """
        if not self._is_torch_adam() or getattr(self, "max_grad_norm", 0.0) > 0:
            self._step_supports_amp_scaling = False

    def _is_torch_adam(self) -> bool:
        """Whether torch's own step supports the options of all groups."""
        return all(group.get("bias_correction", True) for group in self.param_groups)

    def _from_apex(self, group: dict[str, Any], state: dict[Any, dict]) -> None:
        copy_steps_to_params(group, state)

    def step(self, closure: Callable | None = None, **old_arguments: Any) -> Any:
        """Take one step.  Returns what the closure returns."""
        for name, value in old_arguments.items():
            if value is not None and value != 1.0:
                instead = "scale_loss, which unscales, and step() alone"
                refuse("FusedAdam.step", f"{name}=...", instead)
        return super().step(closure)

    def _update(self) -> None:
        for group in self.param_groups:
            limit = group.get("max_grad_norm", self.max_grad_norm)
            if limit > 0:
                torch.nn.utils.clip_grad_norm_(group["params"], limit)
        step = torch.optim.Adam.step
        if self._is_torch_adam():
            self._step_of_torch(step, decouples_decay=False)
            return
        groups = self.param_groups
        corrected = [group for group in groups if group.get("bias_correction", True)]
        for group in groups:
            if not group.get("bias_correction", True):
                self._update_uncorrected(group)
        self.param_groups = corrected
        try:
            self._step_of_torch(step, decouples_decay=False)
        finally:
            self.param_groups = groups

    def _update_uncorrected(self, group: dict[str, Any]) -> None:
        params = params_with_grads(group)
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
        moments = [[self.state[param][name] for param in params] for name in _MOMENT_NAMES]
        lists = [[param.grad for param in params], params, *moments]
        options = (group["lr"], *group["betas"], group["eps"], 1, self.adam_w_mode, 0)
        self.multi_tensor_adam(0, None, lists, *options, group["weight_decay"])
