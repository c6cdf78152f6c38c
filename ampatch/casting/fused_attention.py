"""The fused kernels that torch has for attention and encoder layers in evaluation, in half.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` ask one function without
arguments, `torch.backends.mha.get_fastpath_enabled`, whether they may call them, and then
look at what they were given.  Its replacement allows a kernel in half where the result is
that of the single calls, but for half's rounding: where only the tables decide about those
calls, and the kernel computes what the module would.  torch's own questions come after it.

Elsewhere the single calls run, as in training: in a layer with `norm_first`, whose sum
grows from layer to layer and stays in FP32; with masks that are more than "this place
or not", which the kernel would take for that; with a mask that hides every place of a row,
for which it gives NaN; with masks that the host cannot read.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..torch_private import attention
from ..torch_private.devices import FUSED_ATTENTION
from ..torch_private.modules import GLOBAL_FORWARD_TABLES, parts_of
from ..torch_private.probes import is_recording
from .cast_observers import observed, observers
from .cast_state import CastState
from .handlers import call_handlers, is_asked, unseen
from .policy import Policy
from .rules import SCALARS, TENSORS, cast, castable

_PARTS: tuple[tuple[str, Any], ...] = (
    ("self_attn", nn.MultiheadAttention),
    ("linear1", nn.Linear),
    ("linear2", nn.Linear),
    ("norm1", nn.LayerNorm),
    ("norm2", nn.LayerNorm),
    ("dropout", nn.Dropout),
    ("dropout1", nn.Dropout),
    ("dropout2", nn.Dropout),
)
"""Of an encoder layer: the kernel knows their weights, and not what their forwards do."""

# Positions in the calls that torch's modules make.
_ATTENTION_WEIGHTS, _ATTENTION_LENGTH = (5, 6, 7, 8), 13
_LAYER_WEIGHTS, _LAYER_NORMS = (3, 4, 5, 6, 14, 15, 16, 17), (10, 11, 12, 13)
_LAYER_NORM_FIRST, _LAYER_LENGTH = 8, 20

_PLAIN_ARGUMENTS = TENSORS | SCALARS
_layout_of = operator.attrgetter("layout")
_dtype_of = operator.attrgetter("dtype")


def fast_path(original: Callable, state: CastState) -> Callable:
    """For `torch.backends.mha.get_fastpath_enabled`.

    Only the asking module's frame says whose call it is.  Code being compiled has no frames,
    and may not call the original.
    """

    def get_fastpath_enabled() -> bool:
        if is_dynamo_compiling():
            return state.table_policy() is None and attention.is_fast_path_enabled()
        policy = state.policy_here()
        if policy is None or not original():
            return original()
        asking = sys._getframe(1).f_locals
        if _is_training(asking.get("self")):
            return False
        if not state.modes:
            return _suits(asking, policy, state) or _is_left_alone(asking, policy)
        with unseen():
            return _suits(asking, policy, state) or _is_left_alone(asking, policy)

    return get_fastpath_enabled


def _is_training(module: Any) -> bool:
    """Whether torch refuses by itself, after many more questions."""
    return isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) and (
        module.training
    )


def _suits(asking: dict[str, Any], policy: Policy, state: CastState) -> bool:
    """Whether the kernel in half would give what the single calls of the asking module give."""
    module = asking.get("self")
    weights: Callable[[Any], list[Any]]
    if isinstance(module, nn.MultiheadAttention):
        given, masks, weights = "query", ("attn_mask", "key_padding_mask"), _weights_of_attention
    elif type(module) is nn.TransformerEncoderLayer:
        given, masks, weights = "src", ("src_mask", "src_key_padding_mask"), _weights_of_layer
    else:
        return False
    return (
        _only_tables_decide(policy, state)
        and _is_plain(asking.get(given), policy)
        and _are_plain(weights(module))
        and _only_hide_places([asking[name] for name in masks if asking.get(name) is not None])
    )


def _only_tables_decide(policy: Policy, state: CastState) -> bool:
    """Whether nobody has a say in the single calls, nor looks at them, but the tables."""
    return not (
        policy.special
        or policy.gate is not None
        or policy.apex_tables
        or observers
        or any(GLOBAL_FORWARD_TABLES)  # tools that watch all modules look at what they call too
        or state.has_rules_of_user
        or is_recording()
        or attention.is_forward_ad_on()
    )


def _is_plain(given: Any, policy: Policy) -> bool:
    return (
        type(given) in TENSORS
        and not given.is_nested
        and given.device.type in FUSED_ATTENTION
        and castable(given, policy)
    )


def _weights_of_attention(module: Any) -> list[Any]:
    own, out = module._parameters, parts_of(module).get("out_proj")
    further = () if out is None else out._parameters.values()
    return [own.get("in_proj_weight"), own.get("in_proj_bias"), *further]


def _weights_of_layer(layer: Any) -> list[Any]:
    """Its weights; None is among them where the kernel does something else than the layer.

    It does the same for parts that are torch's own, in evaluation, without a forward put in
    from outside.
    """
    parts = parts_of(layer)
    weights: list[Any] = [None] if layer.norm_first else []
    for name, kind in _PARTS:
        part: Any = parts.get(name)
        if type(part) is not kind or part.training or "forward" in part.__dict__:
            return [None]
        is_attention = kind is nn.MultiheadAttention
        weights += _weights_of_attention(part) if is_attention else part._parameters.values()
    return weights


def _are_plain(weights: list[Any]) -> bool:
    return {*map(type, weights)} == {Parameter} and {*map(_layout_of, weights)} == {torch.strided}


def _only_hide_places(masks: list[Any]) -> bool:
    """Whether a mask says of each place whether it counts, and leaves each row one that does."""
    if not masks:
        return True
    mask = masks[0]
    if len(masks) > 1 or type(mask) is not Tensor or not mask.is_cpu:
        return False
    hidden = mask.isneginf()
    return bool(((mask == 0) | hidden).all()) and not bool(hidden.all(-1).any())


def _is_left_alone(asking: dict[str, Any], policy: Policy) -> bool:
    """Whether the policy casts nothing of the asking module.

    Nothing is cast of nested tensors either, which these modules take on no other path.
    """
    module, inputs = asking.get("self"), []
    if not isinstance(module, nn.Module):
        return False
    for value in asking.values():
        if value is not None and type(value) is not bool and isinstance(value, Tensor):
            if value.is_nested:
                return True
            inputs.append(value)
    if policy.gate is not None:
        return not policy.gate((*inputs, *module.parameters()), {})
    for tensor in inputs:  # one of them nearly always answers: parameters take long to find
        if castable(tensor, policy):
            return False
    return not any(castable(parameter, policy) for parameter in module.parameters())


def attention_kernel(original: Callable, state: CastState) -> Callable:
    """Self-attention: the result in half, as its last product gives it, weights in FP32."""

    def in_half(args: tuple, policy: Policy) -> Any:
        given = list(args)
        given[0] = given[1] = given[2] = cast(args[0], policy.half_to, policy)
        _cast_weights(_ATTENTION_WEIGHTS, given, policy)
        output, weights = original(*given)
        return output, cast(weights, policy.float_to, policy)

    def is_known(args: tuple) -> bool:
        return len(args) == _ATTENTION_LENGTH and args[0] is args[1] is args[2]

    return _where_tables_decide(original, in_half, is_known, state)


def layer_kernel(original: Callable, state: CastState) -> Callable:
    """An encoder layer: the result in FP32, as LayerNorm, which comes last, gives it."""

    def in_half(args: tuple, policy: Policy) -> Any:
        given = list(args)
        given[0] = cast(args[0], policy.half_to, policy)
        places: tuple[int, ...] = (
            _LAYER_WEIGHTS  # on the CPU LayerNorm takes FP32 weights beside half
        )
        if not (given[0].is_cpu and _are_float(args[place] for place in _LAYER_NORMS)):
            places += _LAYER_NORMS
        _cast_weights(places, given, policy)
        return cast(original(*given), policy.float_to, policy)

    def is_known(args: tuple) -> bool:
        return len(args) == _LAYER_LENGTH and not args[_LAYER_NORM_FIRST]

    return _where_tables_decide(original, in_half, is_known, state)


def _where_tables_decide(
    original: Callable,
    in_half: Callable[[tuple, Policy], Any],
    is_known: Callable[[tuple], bool],
    state: CastState,
) -> Callable:
    """`in_half` for calls as torch's modules make them; other calls are left as they are."""

    def patched(*args: Any, **kwargs: Any) -> Any:
        may_be_asked = state.modes or kwargs or not _PLAIN_ARGUMENTS.issuperset(map(type, args))
        if may_be_asked and is_asked(args, kwargs):
            return call_handlers(state, patched, original, args, kwargs)
        policy = None if is_dynamo_compiling() else state.policy_here()
        if (
            policy is not None
            and not kwargs
            and is_known(args)
            and not (torch.is_grad_enabled() and any(map(_wants_gradients, args)))
            and _only_tables_decide(policy, state)
            and _is_plain(args[0], policy)
        ):
            return in_half(args, policy)
        call = observed(original, args, kwargs) if observers else original
        return call(*args, **kwargs)

    return patched


def _wants_gradients(value: Any) -> bool:
    """The kernels have no derivatives; torch's modules do not call them with such tensors."""
    return isinstance(value, Tensor) and value.requires_grad


def _are_float(weights: Iterable[Tensor]) -> bool:
    return {*map(_dtype_of, weights)} == {torch.float32}


def _cast_weights(places: tuple[int, ...], given: list[Any], policy: Policy) -> None:
    to = policy.half_to
    weights = [given[place] for place in places]
    halves: Sequence[Tensor]
    if _are_float(weights) and to is not torch.float32:
        halves = policy.cache.cast_outside_graphs(weights, to)
    else:
        halves = [cast(weight, to, policy) for weight in weights]
    for place, half in zip(places, halves):
        given[place] = half
