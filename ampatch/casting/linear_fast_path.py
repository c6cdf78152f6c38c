"""HOT PATH: the commonest calls of all, an input with a weight and perhaps a bias.

`F.linear` and the convolutions follow the rule HALF as in `casts.py`, and
everything out of the ordinary goes there.  The ordinary is said here in one
function: the tables alone decide, the input is a plain tensor, and the weights are
parameters, which the weight cache has half copies of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .policy import CastState, Policy
from .rules import CHOOSERS, replacement
from .tables import Rule

NAMES = frozenset(
    (
        "linear",
        *("conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)
"""Functions that begin with `(input, weight, bias=None`; what follows are no tensors."""


_ABSENT = object()
"""An argument not given by position: handlers see a call as the caller made it."""


def weighted(original: Callable, state: CastState) -> Callable:
    """As `replacement(original, HALF, state)`, for one of the functions in `NAMES`."""

    def patched(
        input: Any = _ABSENT,
        weight: Any = _ABSENT,
        bias: Any = _ABSENT,
        /,
        *rest: Any,
        **kwargs: Any,
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
            return in_general(*_given(input, weight, bias), *rest, **kwargs)
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
            return in_general(*_given(input, weight, bias), *rest)
        half_weight = cache.find(weight, to)
        if half_weight is None:
            if not _is_ordinary(weight, policy):
                return in_general(*_given(input, weight, bias), *rest)
            half_weight = cache.make(weight, to)
        half_bias = None
        if bias is not None and bias is not _ABSENT:
            half_bias = cache.find(bias, to)
            if half_bias is None:
                if not _is_ordinary(bias, policy):
                    return in_general(*_given(input, weight, bias), *rest)
                half_bias = cache.make(bias, to)
        if rest:
            return original(half_input, half_weight, half_bias, *rest)
        return original(half_input, half_weight, half_bias)

    in_general = replacement(original, CHOOSERS[Rule.HALF], state, patched)
    return patched


def _given(*arguments: Any) -> list:
    """Those that were given by position."""
    return [argument for argument in arguments if argument is not _ABSENT]


def _is_ordinary(weight: Any, policy: Policy) -> bool:
    """Whether this is a parameter that the weight cache has a half copy of, or makes one."""
    return (
        type(weight) is Parameter
        and weight.dtype is torch.float32
        and weight.layout is torch.strided
        and (policy.devices is None or weight.device.type in policy.devices)
    )
