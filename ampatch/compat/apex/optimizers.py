"""apex.optimizers: torch's own under apex's names, arguments and defaults.

On CUDA parameters torch's fused kernels are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FusedAdagrad", "FusedAdam", "FusedSGD"]


class _Fused:
    """What apex's optimizers have in common: gradients are dropped or zeroed as asked."""

    set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them where `set_grad_none=False` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_Fused, torch.optim.Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`, unless `adam_w_mode=False`.

    The default weight decay is apex's 0.  `capturable` and `master_weights` are
    accepted; masters are the business of `initialize` at O2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            _refuse("FusedAdam", "amsgrad=True", "torch.optim.AdamW(amsgrad=True)")
        if not bias_correction:
            _refuse("FusedAdam", "bias_correction=False", "an Adam of your own, or leave it out")
        params = _listed(params)
        known = inspect.signature(torch.optim.Adam).parameters
        decoupled = {"decoupled_weight_decay": adam_w_mode}
        if "decoupled_weight_decay" not in known:
            if weight_decay and adam_w_mode:
                _refuse("FusedAdam", "weight_decay in this old torch", "torch.optim.AdamW")
            decoupled = {}
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            fused=_all_on_cuda(params) or None,
            **decoupled,
        )
        self.adam_w_mode = int(adam_w_mode)
        self.set_grad_none = set_grad_none


class FusedSGD(_Fused, torch.optim.SGD):
    """`torch.optim.SGD`.  `materialize_master_grads` is accepted and changes nothing."""

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
        if wd_after_momentum:
            _refuse("FusedSGD", "wd_after_momentum=True", "torch.optim.SGD and leave it out")
        params = _listed(params)
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=_all_on_cuda(params) or None,
        )
        self.set_grad_none = set_grad_none


class FusedAdagrad(_Fused, torch.optim.Adagrad):
    """`torch.optim.Adagrad`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        if adagrad_w_mode:
            _refuse("FusedAdagrad", "adagrad_w_mode=True", "torch.optim.AdamW and leave it out")
        super().__init__(_listed(params), lr=lr, eps=eps, weight_decay=weight_decay)
        self.adagrad_w_mode = int(adagrad_w_mode)
        self.set_grad_none = set_grad_none


def _refuse(name: str, argument: str, instead: str) -> None:
    raise RuntimeError(f"apex.optimizers.{name}({argument}): torch has no such. Use {instead}.")


def _listed(params: Any) -> list:
    """Parameters or groups in a list, generators in groups read once: they are looked at twice."""
    if isinstance(params, Tensor):
        raise TypeError("params: expected an iterable of tensors or dicts, got one tensor.")
    return [
        {**group, "params": _in_group(group["params"])} if isinstance(group, dict) else group
        for group in params
    ]


def _in_group(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def _all_on_cuda(params: list) -> bool:
    tensors = [
        tensor
        for entry in params
        for tensor in (entry["params"] if isinstance(entry, dict) else [entry])
    ]
    return bool(tensors) and all(
        isinstance(tensor, Tensor) and tensor.is_cuda and tensor.is_floating_point()
        for tensor in tensors
    )
