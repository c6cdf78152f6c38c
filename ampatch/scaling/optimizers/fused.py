"""Fused optimizers, whose kernels skip a step after an overflow without a host sync."""

from __future__ import annotations

from typing import Any

import torch

from ...torch_private import optimizers


def prepare_skip_in_kernel(optimizer: Any) -> bool:
    """Return whether the kernels of all parameter groups read `optimizer.found_inf`.

    In a fused optimizer, a group with `fused=False` would step with gradients of inf.  The function
    also creates the momentum buffers of fused SGD that are missing.
    """
    return (
        optimizers.skips_in_kernel(optimizer)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and _fill_momentum(optimizer)
    )


def _fill_momentum(optimizer: Any) -> bool:
    """Create missing momentum buffers of fused SGD as zeros; False if SGD has dampening.

    If the first step is skipped, fused SGD leaves the buffer uninitialized (torch 2.13).  Without
    dampening, a buffer of zeros gives the same step as no buffer.
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
