"""FusedSGD and FusedAdagrad."""

from __future__ import annotations

from typing import Any

import torch

from .common import ApexOptimizer, copy_steps_to_params

__all__ = ["FusedAdagrad", "FusedSGD"]


class FusedSGD(ApexOptimizer, torch.optim.SGD):
    """`torch.optim.SGD`; with `wd_after_momentum` the weight decay stays out of the momentum.

    `materialize_master_grads` is accepted and changes nothing.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
        materialize_master_grads: bool = True, set_grad_none: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, set_grad_none, may_fuse=not wd_after_momentum,
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov,
        )  # fmt: skip
        self.wd_after_momentum = wd_after_momentum

    def _update(self) -> None:
        self._step_of_torch(torch.optim.SGD.step, self.wd_after_momentum)


class FusedAdagrad(ApexOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad`; with `adagrad_w_mode` weight decay stays out of the gradients."""

    def __init__(
        self, params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        set_grad_none: bool = True, adagrad_w_mode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, set_grad_none, lr=lr, eps=eps, weight_decay=weight_decay)
        self.adagrad_w_mode = int(adagrad_w_mode)

    def _from_apex(self, group: dict[str, Any], state: dict[Any, dict]) -> None:
        copy_steps_to_params(group, state)

    def _update(self) -> None:
        self._step_of_torch(torch.optim.Adagrad.step, bool(self.adagrad_w_mode))
