"""Fused optimizers: their kernels skip a step after an overflow, and the host does not wait."""

from __future__ import annotations

from typing import Any

import torch

from ...torch_private import optimizers


def skips_in_kernel(optimizer: Any) -> bool:
    """Whether every group of the optimizer heeds `optimizer.found_inf`.

    A group with `fused=False` in a fused optimizer would step on inf.
    """
    return (
        optimizers.skips_in_kernel(optimizer)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and _fill_momentum(optimizer)
    )


def _fill_momentum(optimizer: Any) -> bool:
    """Give fused SGD its momentum buffers; False if zeros would not do.

    If its first step is skipped, it leaves a buffer uninitialized (torch 2.13).  Without dampening
    zeros are the same as no buffer.
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
