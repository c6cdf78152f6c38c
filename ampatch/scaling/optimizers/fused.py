"""Fused optimizers: their kernels skip a step after an overflow, without a host sync."""

from __future__ import annotations

from typing import Any

import torch

from ...torch_private import optimizers


def prepare_skip_in_kernel(optimizer: Any) -> bool:
    """Whether the kernels of all groups of the optimizer read `optimizer.found_inf`.

    A group with `fused=False` in a fused optimizer would step on inf.  Fills the momentum buffers
    of fused SGD.
    """
    return (
        optimizers.skips_in_kernel(optimizer)
        and all(group.get("fused", True) for group in optimizer.param_groups)
        and _fill_momentum(optimizer)
    )


def _fill_momentum(optimizer: Any) -> bool:
    """Fill missing momentum buffers of fused SGD with zeros; False if it has dampening.

    If the first step is skipped, fused SGD leaves a buffer uninitialized (torch 2.13).  Without
    dampening a buffer of zeros gives the same step as no buffer.
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
