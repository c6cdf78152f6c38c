"""Functions of torch that need more than a cast, and so cannot be rows of a table.

Each function here returns `make(original) -> replacement` for one function of torch, or a
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

from ..config.opt_levels import HALF_DTYPES
from ..torch_private.modules import FLAT_WEIGHTS, PARAMETERS, is_fast_path_enabled
from ..torch_private.probes import is_recording, is_tracing
from .arguments import tensors_in
from .calls import PROCESS_POLICY, Call, CastState, thread_calls
from .cast_observers import observers
from .dynamo_tables import opaque_call
from .handlers import without_modes_if_any
from .policy import Policy
from .rules import (
    CHOOSERS,
    TENSORS,
    Choose,
    cast,
    cast_arguments,
    first_argument,
    is_castable,
    widest_dtype,
)
from .tables import Row, Rule

Make = Callable[[Callable], Callable]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
LARGE_WEIGHT = 2**14
"""From so many elements on, converting a half copy takes longer than looking up its FP32 weight."""

_ANY_DEVICE = Policy(half_to=torch.float32)

OVERRIDDEN = Row("", (), Rule.FLOAT_UNLESS_DTYPE, "Named in overrides= at O2 or O3.")
"""The row of EVERY_LEVEL that a function has while a session of half models names it."""


def make_run_in_fp32(row: Row, name: str, state: CastState) -> Callable:
    """Make the `run_in_fp32` of `wrapper.replacement`, for a row of EVERY_LEVEL.

    PyTorch computes such a function wrongly in half.  The row says which calls run in FP32
    internally.  The result has the dtype that PyTorch gives it; an in-place call writes it into its
    first argument.  Where an argument is a half copy in the slot of a weight, the call reads the
    FP32 weight instead.
    """
    choose, is_everywhere = CHOOSERS[row.rule], row.rule in (Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE)
    in_place = name.endswith("_") and not name.endswith("__")
    is_norm = row.rule is Rule.FLOAT_ON_CPU_IF_HALF_WEIGHT  # FP32 statistics widen no result

    def run_in_fp32(policy: Policy | None, call: Callable, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                if value.dtype in HALF_DTYPES:
                    break
            elif isinstance(value, (list, tuple)) and _has_half(value):
                break
        else:
            return call(*args, **kwargs)
        if row.only_gradient and not _is_recorded(args, kwargs):
            return call(*args, **kwargs)
        to = choose(args, kwargs, _ANY_DEVICE) if is_everywhere or value.is_cpu else None
        if to is None or kwargs.get("out") is not None:
            return call(*args, **kwargs)
        promoted = ((first_argument(args, kwargs),), {}) if is_norm else (args, kwargs)
        dtype = widest_dtype(*promoted, _ANY_DEVICE)
        if dtype is None or dtype is to:
            return call(*args, **kwargs)
        cast_args, cast_kwargs = cast_arguments(
            *(map(float_of, args), {name: float_of(arg) for name, arg in kwargs.items()}),
            *(to, _ANY_DEVICE),
        )
        result = call(*cast_args, **cast_kwargs)
        if in_place:
            return first_argument(args, kwargs).copy_(result)
        return cast(result, dtype, _ANY_DEVICE)

    def float_of(value: Any) -> Any:
        if isinstance(value, Tensor) and not is_dynamo_compiling() and thread_calls.stack:
            return state.float_of(value) if value.numel() >= LARGE_WEIGHT else value
        return value

    return run_in_fp32


def _has_half(values: Sequence) -> bool:
    return any(tensor.dtype in HALF_DTYPES for tensor in tensors_in(values))


def _is_recorded(args: tuple, kwargs: dict) -> bool:
    """Whether autograd may record this call; within a transform tensors do not tell.

    A trace casts the same in each grad mode: `torch.jit.trace` checks it under `no_grad`.
    """
    if not torch.is_grad_enabled():
        return not is_dynamo_compiling() and is_tracing()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return is_dynamo_compiling() or is_recording()


def with_fp32_kernels(
    name: str, choose: Choose, run_in_fp32: Callable | None
) -> tuple[Choose, Callable | None]:
    """Let a row that casts to FP32 use kernels that read half tensors and compute in FP32.

    Accelerators have some; then no FP32 copy is made.  Takes and returns the `choose` and the
    `run_in_fp32` of `wrapper.replacement`.
    """
    if name not in _FP32_KERNELS:
        return choose, run_in_fp32
    can_compute, compute = _FP32_KERNELS[name]

    def needs_no_copy(args: tuple, kwargs: dict, policy: Policy) -> bool:
        value = first_argument(args, kwargs)
        return (
            type(value) in TENSORS
            and value.dtype in HALF_DTYPES
            and not value.is_cpu
            and not is_dynamo_compiling()  # a compiler fuses the cast
            and value.layout is torch.strided
            and policy.float_to is torch.float32
            and policy.casts_on(value.device.type)
            and can_compute(*args, **kwargs)
        )

    def choose_copy(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
        return None if needs_no_copy(args, kwargs, policy) else choose(args, kwargs, policy)

    def run(policy: Policy | None, call: Callable, *args: Any, **kwargs: Any) -> Any:
        if policy is not None and needs_no_copy(args, kwargs, policy):
            return compute(call, *args, **kwargs)
        if run_in_fp32 is None:
            return call(*args, **kwargs)
        return run_in_fp32(policy, call, *args, **kwargs)

    return choose_copy, run


def _has_no_dtype(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    return dtype is None and not any(arg is None or type(arg) is torch.dtype for arg in args)


def _with_dtype(call: Callable, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **{**kwargs, "dtype": torch.float32})


def _has_class_indices(input: Tensor, target: Any, *others: Any, **named: Any) -> bool:
    if observers:  # observers see the call and its cast
        return False
    if named or len(others) != 4:  # not as F.cross_entropy calls it
        return False
    weight, _, _, label_smoothing = others
    is_index = isinstance(target, Tensor) and not target.is_floating_point()
    return is_index and target.shape != input.shape and weight is None and not label_smoothing


def _cross_entropy_of_indices(call: Callable, input: Tensor, target: Tensor, *others: Any) -> Any:
    _, reduction, ignore_index, _ = others
    log_probabilities = torch.ops.aten.log_softmax(input, min(1, input.dim() - 1), torch.float32)
    return torch.ops.aten.nll_loss_nd(log_probabilities, target, None, reduction, ignore_index)


# Left out: what takes no half tensor (matrix norms), or computes its gradient in half (cumsum).
_WITH_DTYPE_ARGUMENT = ("log_softmax", "softmax", "sum", "vector_norm")
_FP32_KERNELS: dict[str, tuple[Callable[..., bool], Callable]] = {  # can it compute a call; how
    **dict.fromkeys(_WITH_DTYPE_ARGUMENT, (_has_no_dtype, _with_dtype)),
    "cross_entropy_loss": (_has_class_indices, _cross_entropy_of_indices),
}


def module_functions(state: CastState) -> list[tuple[str, str, Make]]:
    """Functions of torch's modules that check dtypes or autocast by themselves."""
    return [
        ("torch.nn.RNNBase", "check_input", lambda original: _rnn_check_input(original, state)),
        (
            "torch.nn.functional",
            "multi_head_attention_forward",
            lambda original: opaque_attention(original, state),
        ),
        (
            "torch.backends.mha",
            "get_fastpath_enabled",
            lambda original: _fast_path(original, state),
        ),
    ]


def embedding_forwards() -> list[tuple[str, str, Make]]:
    """Forwards that look up in the FP32 weight where a half model has a half copy of it."""
    return [(f"torch.nn.{kind.__name__}", "forward", _embedding_forward) for kind in EMBEDDINGS]


def _embedding_forward(original: Callable) -> Callable:
    """TorchScript compiles the source of `original`, which needs the `F` of this module."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        table = self.__dict__.get(PARAMETERS)
        if type(table) is dict or getattr(table, "module", None) is not self:
            return original(self, *args, **kwargs)
        return table.look_up(original, args, kwargs)  # type: ignore[union-attr]

    return forward


def _fast_path(original: Callable, state: CastState) -> Callable:
    """Whether attention and encoder layers may take fused kernels in evaluation.

    As under autocast, they may not where calls are cast: a fused kernel is a single call, and the
    rows are for the functions in it.  A policy with a condition casts some calls only; the tensors
    of this call are in the frame of the module that asks.  Compiled code has no frames, and may not
    call the original.
    """

    def get_fastpath_enabled() -> bool:
        if is_dynamo_compiling():
            return state.current() is None and is_fast_path_enabled()
        policy = state.current()
        if policy is None or not original():
            return original()
        if policy.condition is None:
            return False
        caller = sys._getframe(1).f_locals
        module = caller.get("self")
        with without_modes_if_any(state):
            tensors = [value for value in caller.values() if isinstance(value, Tensor)]
            weights = module.parameters() if isinstance(module, nn.Module) else ()
            return not policy.condition((*tensors, *weights), {})

    return get_fastpath_enabled


def prepare_attention(policy: Policy, state: CastState) -> None:
    """Prepare the call that stands for attention in Dynamo's graphs under this policy."""
    policy.attention_in_graphs = _attention_under(policy, state)


def _attention_under(policy: Policy | None, state: CastState) -> Callable:
    def enter(call: Call) -> None:
        state.enter(call, None)
        state.set_policy(call, policy)

    def attention(*args: Any, **kwargs: Any) -> Any:
        return state.within(enter, F.multi_head_attention_forward, *args, **kwargs)

    return opaque_call(attention)


def opaque_attention(original: Callable, state: CastState) -> Callable:
    """Attention of `nn.MultiheadAttention` as one opaque call in Dynamo's graphs, not traced.

    AOTAutograd runs that call later, outside of the model's forward.  So the call sets its policy.
    """
    without_casts = _attention_under(None, state)

    @functools.wraps(original)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        call = original
        if state.per_thread and is_dynamo_compiling():
            own = thread_calls.policy
            if own is None:
                call = without_casts
            elif own is not PROCESS_POLICY and own.attention_in_graphs is not None:
                call = own.attention_in_graphs
        return call(*args, **kwargs)

    return multi_head_attention_forward


def _rnn_check_input(original: Callable, state: CastState) -> Callable:
    """RNNs refuse an input in another dtype than the weights', before it could be cast."""

    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        policy = state.current()
        if policy is not None:
            with without_modes_if_any(state):
                weights = getattr(self, FLAT_WEIGHTS, None) or list(self.parameters())
                input = _like_weights(input, weights[0], policy)
        return original(self, input, batch_sizes)

    return check_input


def _like_weights(input: Tensor, weights: Tensor, policy: Policy) -> Tensor:
    """An input for that check: in the weights' dtype, if `input` and they are to be cast."""
    if (
        input.dtype is not weights.dtype
        and is_castable(input, policy)
        and is_castable(weights, policy)
    ):
        return input.new_empty(input.shape, dtype=weights.dtype)
    return input
