"""torch's foreach functions, which process a list of tensors in one call.

If this torch lacks one, the tensors are processed one by one.  The functions are named and called
like the methods of a tensor: `addcmul_(tensors, first, second, value=2)`.  A list among the other
arguments has an item for each tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .torch_attributes import torch_attribute

FOREACH_COPY = "_foreach_copy_"
"""torch's name of `copy_` for lists."""


def call_one_by_one(name: str, tensors: list[Tensor], *others: Any, **kwargs: Any) -> list[Tensor]:
    """Call the method `name` of each tensor, without gradients."""
    with torch.no_grad():
        return [
            getattr(tensor, name)(
                *[other[index] if isinstance(other, (list, tuple)) else other for other in others],
                **kwargs,
            )
            for index, tensor in enumerate(tensors)
        ]


add = torch_attribute("torch._foreach_add", partial(call_one_by_one, "add"))
add_ = torch_attribute("torch._foreach_add_", partial(call_one_by_one, "add_"))
addcdiv_ = torch_attribute("torch._foreach_addcdiv_", partial(call_one_by_one, "addcdiv_"))
addcmul_ = torch_attribute("torch._foreach_addcmul_", partial(call_one_by_one, "addcmul_"))
copy_ = torch_attribute("torch._foreach_copy_", partial(call_one_by_one, "copy_"))
lerp_ = torch_attribute("torch._foreach_lerp_", partial(call_one_by_one, "lerp_"))
mul = torch_attribute("torch._foreach_mul", partial(call_one_by_one, "mul"))
mul_ = torch_attribute("torch._foreach_mul_", partial(call_one_by_one, "mul_"))
norm = torch_attribute("torch._foreach_norm", partial(call_one_by_one, "norm"))
sqrt = torch_attribute("torch._foreach_sqrt", partial(call_one_by_one, "sqrt"))
