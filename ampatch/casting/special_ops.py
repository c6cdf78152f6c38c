"""Parts of torch that need more than a cast, and so cannot be rows of a table.

Each function here returns `make(original) -> replacement` for one place, or a
list of `(where, name, make)` for `install.py` to put in.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..config.opt_levels import HALF_TYPES
from ..torch_private.modules import FLAT_WEIGHTS, PARAMETERS, is_fast_path_enabled
from ..torch_private.probes import is_recording, is_tracing
from .arguments import tensors_in
from .calls import FOLLOW, Call, CastState, here
from .cast_observers import observers
from .dynamo_tables import opaque_call
from .handlers import unseen_where_modes_are
from .policy import Policy
from .rules import CHOOSERS, TENSORS, Choose, cast, cast_call, castable, first, widest
from .tables import Row, Rule

Make = Callable[[Callable], Callable]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
MANY = 2**14
"""Elements of a weight whose conversion takes longer than finding the FP32 weight behind it."""

_EVERYWHERE = Policy(half_to=torch.float32)

OVERRIDDEN = Row("", (), Rule.FLOAT_UNLESS_DTYPE, "Named in overrides= at O2 or O3.")
"""The row of EVERY_LEVEL that a function has while a session of half models names it."""


def float_inside(row: Row, name: str, state: CastState) -> Callable:
    """Makes calls that PyTorch computes wrongly in half, in FP32 inside where the row says so.

    For `uncast` of `wrapper.replacement`.  The result has the dtype that PyTorch gives it; a call
    that works in place writes it into its first argument.  Instead of a half copy that a model has
    lent the call takes the FP32 weight.
    """
    choose, is_everywhere = CHOOSERS[row.rule], row.rule in (Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE)
    in_place = name.endswith("_") and not name.endswith("__")
    is_norm = row.rule is Rule.FLOAT_ON_CPU_IF_HALF_WEIGHT  # FP32 statistics widen no result

    def uncast(policy: Policy | None, call: Callable, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                if value.dtype in HALF_TYPES:
                    break
            elif isinstance(value, (list, tuple)) and _has_half(value):
                break
        else:
            return call(*args, **kwargs)
        if row.only_gradient and not _is_recorded(args, kwargs):
            return call(*args, **kwargs)
        to = choose(args, kwargs, _EVERYWHERE) if is_everywhere or value.is_cpu else None
        if to is None or kwargs.get("out") is not None:
            return call(*args, **kwargs)
        counted = ((first(args, kwargs),), {}) if is_norm else (args, kwargs)
        wide = widest(*counted, _EVERYWHERE)
        if wide is None or wide is to:
            return call(*args, **kwargs)
        cast_args, cast_kwargs = cast_call(
            map(given, args), {key: given(value) for key, value in kwargs.items()}, to, _EVERYWHERE
        )
        made = call(*cast_args, **cast_kwargs)
        return first(args, kwargs).copy_(made) if in_place else cast(made, wide, _EVERYWHERE)

    def given(value: Any) -> Any:
        if isinstance(value, Tensor) and not is_dynamo_compiling() and here.stack:
            return state.float_of(value) if value.numel() >= MANY else value
        return value

    return uncast


def _has_half(values: Sequence) -> bool:
    return any(one.dtype in HALF_TYPES for one in tensors_in(values))


def _is_recorded(args: tuple, kwargs: dict) -> bool:
    """Whether a graph may be recorded; within a transform a tensor does not know.

    A trace is the same in each mode: `torch.jit.trace` compares one without gradients.
    """
    if not torch.is_grad_enabled():
        return not is_dynamo_compiling() and is_tracing()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return is_dynamo_compiling() or is_recording()


def float_by_itself(
    name: str, choose: Choose, uncast: Callable | None
) -> tuple[Choose, Callable | None]:
    """`choose` and `uncast` of `wrapper.replacement` for a row that casts to FP32.

    Where an accelerator computes the function in FP32 from a half tensor, no copy is made.
    """
    if name not in _BY_ITSELF:
        return choose, uncast
    takes, compute = _BY_ITSELF[name]

    def is_taken(args: tuple, kwargs: dict, policy: Policy) -> bool:
        value = first(args, kwargs)
        return (
            type(value) in TENSORS
            and value.dtype in HALF_TYPES
            and not value.is_cpu
            and not is_dynamo_compiling()  # a compiler fuses the cast
            and value.layout is torch.strided
            and policy.float_to is torch.float32
            and policy.casts_on(value.device.type)
            and takes(*args, **kwargs)
        )

    def chosen(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
        return None if is_taken(args, kwargs, policy) else choose(args, kwargs, policy)

    def made(policy: Policy | None, call: Callable, *args: Any, **kwargs: Any) -> Any:
        if policy is not None and is_taken(args, kwargs, policy):
            return compute(call, *args, **kwargs)
        return call(*args, **kwargs) if uncast is None else uncast(policy, call, *args, **kwargs)

    return chosen, made


def _leaves_dtype_open(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    return dtype is None and not any(arg is None or type(arg) is torch.dtype for arg in args)


def _with_dtype(call: Callable, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **{**kwargs, "dtype": torch.float32})


def _has_classes(input: Tensor, target: Any, *others: Any, **named: Any) -> bool:
    if observers:  # they are to see the call, and the cast
        return False
    if named or len(others) != 4:  # not as F.cross_entropy calls it
        return False
    weight, _, _, label_smoothing = others
    is_index = isinstance(target, Tensor) and not target.is_floating_point()
    return is_index and target.shape != input.shape and weight is None and not label_smoothing


def _cross_entropy_of_classes(call: Callable, input: Tensor, target: Tensor, *others: Any) -> Any:
    _, reduction, ignore_index, _ = others
    log_probabilities = torch.ops.aten.log_softmax(input, min(1, input.dim() - 1), torch.float32)
    return torch.ops.aten.nll_loss_nd(log_probabilities, target, None, reduction, ignore_index)


# Not those of which torch takes no half (matrix norms), or computes the gradient in half (cumsum).
_BY_DTYPE = ("log_softmax", "softmax", "sum", "vector_norm")
_BY_ITSELF: dict[str, tuple[Callable[..., bool], Callable]] = {  # who takes a call, and makes it
    **dict.fromkeys(_BY_DTYPE, (_leaves_dtype_open, _with_dtype)),
    "cross_entropy_loss": (_has_classes, _cross_entropy_of_classes),
}


def module_parts(state: CastState) -> list[tuple[str, str, Make]]:
    """Places in torch's modules that ask about dtypes or autocast on their own."""
    return [
        ("torch.nn.RNNBase", "check_input", lambda original: _rnn_check(original, state)),
        (
            "torch.nn.functional",
            "multi_head_attention_forward",
            lambda original: whole_in_graphs(original, state),
        ),
        (
            "torch.backends.mha",
            "get_fastpath_enabled",
            lambda original: _fast_path(original, state),
        ),
    ]


def embeddings() -> list[tuple[str, str, Make]]:
    """Forwards that look up in an FP32 weight where a half model has lent that."""
    return [(f"torch.nn.{kind.__name__}", "forward", _looking_up) for kind in EMBEDDINGS]


def _looking_up(original: Callable) -> Callable:
    """TorchScript compiles the source of `original`, and looks for its `F` in this module."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        table = self.__dict__.get(PARAMETERS)
        if type(table) is dict or getattr(table, "module", None) is not self:
            return original(self, *args, **kwargs)
        return table.look_up(original, args, kwargs)  # type: ignore[union-attr]

    return forward


def _fast_path(original: Callable, state: CastState) -> Callable:
    """Whether attention and encoder layers may take fused kernels in evaluation.

    As under autocast, they may not where calls are cast: a fused kernel is one call, which no row
    can take apart.  A policy with a gate casts some calls, and only the asking module's frame has
    the tensors of this one.  Code being compiled has no frames, and may not call the original.
    """

    def get_fastpath_enabled() -> bool:
        if is_dynamo_compiling():
            return state.current() is None and is_fast_path_enabled()
        policy = state.current()
        if policy is None or not original():
            return original()
        if policy.gate is None:
            return False
        asking = sys._getframe(1).f_locals
        module = asking.get("self")
        with unseen_where_modes_are(state):
            given = [value for value in asking.values() if isinstance(value, Tensor)]
            weights = module.parameters() if isinstance(module, nn.Module) else ()
            return not policy.gate((*given, *weights), {})

    return get_fastpath_enabled


def record_attention(policy: Policy, state: CastState) -> None:
    """Prepare what a graph of Dynamo's has in the place of attention under this policy."""
    policy.recorded_attention = _attention_under(policy, state)


def _attention_under(policy: Policy | None, state: CastState) -> Callable:
    def begin(call: Call) -> None:
        state.begin(call, None)
        state.set_policy(call, policy)

    def attention(*args: Any, **kwargs: Any) -> Any:
        return state.within(begin, F.multi_head_attention_forward, *args, **kwargs)

    return opaque_call(attention)


def whole_in_graphs(original: Callable, state: CastState) -> Callable:
    """Attention of `nn.MultiheadAttention`, which Dynamo does not trace but keeps as one call.

    AOTAutograd runs the call later, outside of the model's forward: it takes its policy along.
    """
    without_casts = _attention_under(None, state)

    @functools.wraps(original)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        call = original
        if state.per_thread and is_dynamo_compiling():
            own = here.policy
            if own is None:
                call = without_casts
            elif own is not FOLLOW and own.recorded_attention is not None:
                call = own.recorded_attention
        return call(*args, **kwargs)

    return multi_head_attention_forward


def _rnn_check(original: Callable, state: CastState) -> Callable:
    """RNNs refuse an input whose dtype is not the weights'; the cast comes after that check."""

    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        policy = state.current()
        if policy is not None:
            with unseen_where_modes_are(state):
                weights = getattr(self, FLAT_WEIGHTS, None) or list(self.parameters())
                input = _like_weights(input, weights[0], policy)
        return original(self, input, batch_sizes)

    return check_input


def _like_weights(input: Tensor, weights: Tensor, policy: Policy) -> Tensor:
    """An input to compare to the weights: in their dtype, if the casts will bring it there."""
    if input.dtype is not weights.dtype and castable(input, policy) and castable(weights, policy):
        return input.new_empty(input.shape, dtype=weights.dtype)
    return input
