"""Fused optimizers: their kernels skip a step after an overflow, and the host does not wait."""

from __future__ import annotations

from typing import Any

import torch

from ...torch_private import optimizers


def skips_in_kernel(optimizer: Any) -> bool:
    """Whether every group of the optimizer heeds `optimizer.found_inf`.

    A group may be `fused=False` in an optimizer that is fused otherwise; it would
    step on inf.
    """
    return (
        optimizers.skips_in_kernel(optimizer)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and _fill_momentum(optimizer)
    )


def _fill_momentum(optimizer: Any) -> bool:
    """Give fused SGD its momentum buffers; False if zeros would not do.

    It leaves a buffer uninitialized when its very first step is skipped (torch
    2.13).  To start from zeros is the same as to start from none, without dampening.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for param in group["params"]:
            if param.grad is None or optimizer.state[param].get("momentum_buffer") is not None:
                continue
            if group["dampening"]:
                return False
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
    return True
