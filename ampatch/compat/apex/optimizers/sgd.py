"""FusedSGD."""

from __future__ import annotations

from typing import Any

import torch

from .common import Fused

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
        super().__init__(
            params, set_grad_none, may_fuse=not wd_after_momentum,
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov,
        )  # fmt: skip
        self.wd_after_momentum = wd_after_momentum

    def _update(self) -> None:
        self._step_of_torch(torch.optim.SGD.step, self.wd_after_momentum)
