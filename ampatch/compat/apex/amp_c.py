"""amp_C and apex_C: apex's functions over lists of tensors that scripts call by themselves.

amp_C's functions compute in FP32 and round once.  `noop_flag` becomes 1 where something is not
finite; the host does not wait for it.  `chunk_size` is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampatch.torch_private import foreach


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float
) -> None:
    """`out = given * scale` for `[given, out]`, two lists; notes what is not finite in `given`."""
    given, out = tensor_lists
    filled = [tensor for tensor in given if tensor.numel()]
    if filled:
        largest = torch.stack([one.float() for one in foreach.norm(filled, float("inf"))])
        noop_flag.masked_fill_((~largest.isfinite().all()).to(noop_flag.device), 1)
    if out:
        foreach.copy_(out, foreach.mul(_wide(given), scale))


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[list[Tensor]],
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """The norm of all numbers in `[tensors]`, one element; with `per_tensor` that of each too."""
    (given,) = tensor_lists
    if not given:
        return torch.zeros(1, device=noop_flag.device), torch.zeros(0, device=noop_flag.device)
    each = torch.stack(list(foreach.norm(_wide(given))))
    norm = torch.linalg.vector_norm(each).reshape(1)
    noop_flag.masked_fill_(~norm.isfinite().all(), 1)
    return norm, each if per_tensor else each[:0]


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Their numbers in one dimension, one tensor after the other; all are of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` with the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
