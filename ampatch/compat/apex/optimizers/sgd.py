"""FusedSGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .common import Fused, all_on_cuda, listed, unhooked

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
            fused=(all_on_cuda(params) and not wd_after_momentum) or None,
        )
        self.wd_after_momentum = wd_after_momentum
        self.set_grad_none = set_grad_none

    def step(self, closure: Callable | None = None) -> Any:
        """One step; returns what the closure returns."""
        return self._step(closure)

    def _update(self) -> None:
        step = unhooked(torch.optim.SGD.step)
        if self.wd_after_momentum:
            self._decay_apart()
            self._without_weight_decay(step)
        else:
            step(self)
