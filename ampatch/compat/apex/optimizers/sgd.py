"""FusedSGD."""

from __future__ import annotations

from typing import Any

import torch

from .common import Fused, can_be_fused, listed

__all__ = ["FusedSGD"]


class FusedSGD(Fused, torch.optim.SGD):
    """`torch.optim.SGD`; with `wd_after_momentum` the weight decay stays out of the momentum.

    `materialize_master_grads` is accepted and changes nothing.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        params = listed(params)
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=(can_be_fused(params) and not wd_after_momentum) or None,
        )
        self.wd_after_momentum = wd_after_momentum
        self.set_grad_none = set_grad_none

    def _update(self) -> None:
        self._step_of_torch(torch.optim.SGD.step, self.wd_after_momentum)
