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
from torch.nn import Parameter

from .casts import CHOOSERS, replacement
from .policy import CastState, Policy
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
        shadow_of = cache.held.shadow_of
        shadow = shadow_of.get(id(weight))
        if (
            shadow is not None
            and shadow.version == weight._version
            and shadow.pointer == weight.data_ptr()
            and shadow.dtype is to
            and shadow.wants_grad is weight.requires_grad
        ):
            cache.hits += 1
            half_weight = shadow.half
        elif _is_ordinary(weight, policy):
            half_weight = cache.cast(weight, to)
        else:
            return in_general(input, weight, bias, *rest)
        half_bias = None
        if bias is not None:
            other = shadow_of.get(id(bias))
            if (
                other is not None
                and other.version == bias._version
                and other.pointer == bias.data_ptr()
                and other.dtype is to
                and other.wants_grad is bias.requires_grad
            ):
                cache.hits += 1
                half_bias = other.half
            elif _is_ordinary(bias, policy):
                half_bias = cache.cast(bias, to)
            else:
                return in_general(input, weight, bias, *rest)
        if rest:
            return original(half_input, half_weight, half_bias, *rest)
        return original(half_input, half_weight, half_bias)

    in_general = replacement(original, CHOOSERS[Rule.HALF], state, patched)
    return patched


def _is_ordinary(weight: Any, policy: Policy) -> bool:
    """Whether this is a parameter that the weight cache has a half copy of, or makes one."""
    return (
        type(weight) is Parameter
        and weight.dtype is torch.float32
        and weight.layout is torch.strided
        and (policy.devices is None or weight.device.type in policy.devices)
    )
