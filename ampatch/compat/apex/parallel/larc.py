"""LARC, after You, Gitman and Ginsburg 2017 (arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LARC"]


class LARC:
    """An optimizer whose gradients are rescaled tensor by tensor before its step.

    The rate of a tensor is `trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)`.  With
    `clip` the rate limits the optimizer's learning rate (LARC), without `clip` it is a factor of it
    (LARS).  Weight decay is added to the gradient first.  If a tensor or its gradient is all zeros,
    the gradient stays unchanged and the tensor is not decayed.

    LARC is no `torch.optim.Optimizer`: pass `larc.optim` to LR schedulers.  `amp.initialize` takes
    both.
    """

    def __init__(
        self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def step(self, closure: Callable | None = None) -> Any:
        """Take one step.  Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = 0
                self._rescale(group, decay)
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _rescale(self, group: dict[str, Any], decay: float) -> None:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            size, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(grad)
            rate = self.trust_coefficient * size / (length + decay * size + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            is_rescaled = (size != 0) & (length != 0)  # on the device: no synchronization
            param.grad.copy_(torch.where(is_rescaled, (grad + decay * param) * rate, grad))

    # Attributes of the optimizer

    @property
    def param_groups(self) -> list[dict]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict]) -> None:
        self.optim.param_groups = value

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # `copy` asks before it sets `optim`
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"
