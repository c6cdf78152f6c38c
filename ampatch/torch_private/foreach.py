"""Whole lists of tensors at once, where this torch can; one by one where it cannot.

Named and called as the methods of one tensor are: `addcmul_(tensors, first, second,
value=2)`.  A list among the further arguments has an item for each tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TORCH_NAMES = {
    "add": "_foreach_add",
    "add_": "_foreach_add_",
    "addcdiv_": "_foreach_addcdiv_",
    "addcmul_": "_foreach_addcmul_",
    "copy_": "_foreach_copy_",
    "lerp_": "_foreach_lerp_",
    "mul": "_foreach_mul",
    "mul_": "_foreach_mul_",
    "norm": "_foreach_norm",
    "sqrt": "_foreach_sqrt",
}
"""What torch calls each of these functions."""


def one_by_one(name: str, tensors: list[Tensor], *others: Any, **kwargs: Any) -> list[Tensor]:
    """Call the method `name` of each tensor, without gradients."""
    with torch.no_grad():
        return [
            getattr(tensor, name)(
                *[other[index] if isinstance(other, (list, tuple)) else other for other in others],
                **kwargs,
            )
            for index, tensor in enumerate(tensors)
        ]


def _of_torch(name: str) -> Callable:
    found = getattr(torch, TORCH_NAMES[name], None)
    return functools.partial(one_by_one, name) if found is None else found


add = _of_torch("add")
add_ = _of_torch("add_")
addcdiv_ = _of_torch("addcdiv_")
addcmul_ = _of_torch("addcmul_")
copy_ = _of_torch("copy_")
lerp_ = _of_torch("lerp_")
mul = _of_torch("mul")
mul_ = _of_torch("mul_")
norm = _of_torch("norm")
sqrt = _of_torch("sqrt")
