"""HOT PATH: the commonest calls of all, an input with a weight and perhaps a bias.

`F.linear` and the convolutions follow the rule HALF as in `casts.py`, and
everything out of the ordinary goes there.  The ordinary is said here in one
function without a further call: the tables alone decide, the input is a plain
tensor, and the weights are parameters whose half shadows are up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .casts import CHOOSERS, replacement
from .policy import CastState
from .tables import Rule

NAMES = frozenset(
    (
        "linear",
        *("conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)
"""Functions that begin with `(input, weight, bias=None`; what follows are no tensors."""


def weighted(original: Callable, state: CastState) -> Callable:
    """As `replacement(original, HALF, state)`, for one of the functions in `NAMES`."""

    def patched(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **kwargs: Any
    ) -> Any:
        policy = state.process
        if (
            policy is None
            or not policy.is_plain
            or state.overridden
            or kwargs
            or type(input) is not Tensor
            or is_dynamo_compiling()
        ):
            return in_general(input, weight, bias, *rest, **kwargs)
        to, cache = policy.half_to, policy.cache
        shadow_of = cache.held.shadow_of
        shadow = shadow_of.get(id(weight))
        if (
            shadow is None
            or shadow.version != weight._version
            or shadow.pointer != weight.data_ptr()
            or shadow.dtype is not to
        ):
            return in_general(input, weight, bias, *rest)
        half_bias = None
        if bias is not None:
            other = shadow_of.get(id(bias))
            if (
                other is None
                or other.version != bias._version
                or other.pointer != bias.data_ptr()
                or other.dtype is not to
            ):
                return in_general(input, weight, bias, *rest)
            half_bias = other.half
        if input.dtype is to:
            half_input = input
        elif (
            input.dtype is torch.float32
            and (policy.devices is None or input.device.type in policy.devices)
            and input.layout is torch.strided
        ):
            half_input = input.to(to)
        else:
            return in_general(input, weight, bias, *rest)
        cache.hits += 1 if bias is None else 2
        if rest:
            return original(half_input, shadow.half, half_bias, *rest)
        return original(half_input, shadow.half, half_bias)

    in_general = replacement(original, CHOOSERS[Rule.HALF], state, patched)
    return patched
