"""Gradients as torch's kernels for lists take them."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

_is_cpu = operator.attrgetter("is_cpu")
_is_sparse = operator.attrgetter("is_sparse")


def alike(grads: list[Tensor]) -> list[tuple[torch.device, list[Tensor]]]:
    """The tensors that hold their numbers, in lists that one kernel takes together.

    They are of one device, and all sharded or none.
    """
    if len(grads) == 1 and type(grads[0]) is Tensor and not grads[0].is_sparse:  # a whole buffer
        return [(grads[0].device, grads)]
    is_dense_cpu = grads and all(map(_is_cpu, grads)) and not any(map(_is_sparse, grads))
    if is_dense_cpu and len(set(map(type, grads))) == 1:  # the usual case, without a look at each
        return [(grads[0].device, grads)]
    groups: dict[tuple[torch.device, type], list[Tensor]] = {}
    for grad in map(values, grads):
        groups.setdefault((grad.device, type(grad)), []).append(grad)
    return [(device, group) for (device, _), group in groups.items()]


def values(grad: Tensor) -> Tensor:
    """The tensor that holds the numbers: of a sparse gradient its values, coalesced."""
    return grad._values() if grad.is_sparse else grad
