"""amp_C: apex's functions over lists of tensors that scripts call by themselves.

They compute in FP32 and round once.  `noop_flag` becomes 1 where something is not finite; the
host does not wait for it.  `chunk_size` is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampatch.torch_private import foreach

__all__ = ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_scale"]


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float
) -> None:
    """`out = given * scale` for `[given, out]`, two lists; notes what is not finite in `given`."""
    given, out = tensor_lists
    _note(noop_flag, given)
    if out:
        foreach.copy_(out, foreach.mul(_wide(given), scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[list[Tensor]],
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """`out = a * x + b * y` for `[x, y, out]`, three lists.

    Notes what is not finite in `x` (`arg_to_check=0`), in `y` (1) or in both (-1).
    """
    x, y, out = tensor_lists
    _note(noop_flag, [x, y, [*x, *y]][arg_to_check])
    if out:
        sums = foreach.mul(_wide(x), a)
        foreach.add_(sums, foreach.mul(_wide(y), b))
        foreach.copy_(out, sums)


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
    _set(noop_flag, norm)
    return norm, each if per_tensor else each[:0]


def _note(noop_flag: Tensor, tensors: Sequence[Tensor]) -> None:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled:
        _set(noop_flag, torch.stack([one.float() for one in foreach.norm(filled, float("inf"))]))


def _set(noop_flag: Tensor, norms: Tensor) -> None:
    noop_flag.masked_fill_((~norms.isfinite().all()).to(noop_flag.device), 1)


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]
