"""Functions of torch that need more than a cast, and so cannot be rows of a table.

Most functions here return a replacement or a part of one.  Others return a list of
`(where, name, make)`: `install.py` replaces `where.name` with `make(original)`.
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
from ..torch_private.modules import FLAT_WEIGHTS_NAME, PARAMS_NAME, is_fast_path_enabled
from ..torch_private.probes import is_traced_or_transformed, is_tracing
from .arguments import tensors_in
from .calls import FOLLOWS_PROCESS, Call, CastState, thread_calls
from .cast_observers import observers
from .dynamo_patches import opaque_call
from .handlers import without_torch_function_modes_if_any
from .patches import MakeReplacement
from .policy import Policy
from .rules import (
    CHOOSERS,
    PLAIN_TENSOR_TYPES,
    ChooseDtype,
    cast,
    cast_arguments,
    first_argument,
    is_castable,
    widest_dtype,
)
from .tables import Row, Rule

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
LARGE_WEIGHT = 2**14
"""For weights of this many elements or more, converting the half copy takes longer than searching
for its FP32 weight."""

_ANY_DEVICE_FP32 = Policy(half_rows_to=torch.float32)  # casts on all devices, and only to FP32

OVERRIDE_ROW = Row("", (), Rule.FLOAT_UNLESS_DTYPE, "Named in overrides= at O2 or O3.")
"""For `make_call_in_fp32`: the row of a function that `overrides` names at O2 or O3."""


def make_call_in_fp32(row: Row, name: str, state: CastState) -> Callable:
    """Return the `call_original` argument of `wrapper.replacement` for a row of EVERY_LEVEL.

    PyTorch computes such a function wrongly in half.  The row says which calls run in FP32
    internally.  The result has the dtype that PyTorch gives it.  An in-place call writes the result
    into its first argument.  Instead of a half copy in the slot of a weight, the call reads the
    FP32 weight.
    """
    choose = CHOOSERS[row.rule]
    is_for_all_devices = row.rule in (Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE)
    is_in_place = name.endswith("_") and not name.endswith("__")
    # The result of a norm has the dtype of the input, even if the statistics are FP32.
    is_norm = row.rule is Rule.FLOAT_ON_CPU_IF_HALF_WEIGHT

    def call_original(policy: Policy | None, function: Callable, *args: Any, **kwargs: Any) -> Any:
        first_half = None
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                first_half = value if value.dtype in HALF_DTYPES else None
            elif isinstance(value, (list, tuple)):
                first_half = _first_half_in(value)
            if first_half is not None:
                break
        if first_half is None:
            return function(*args, **kwargs)
        if row.only_gradient and not _needs_grad(args, kwargs):
            return function(*args, **kwargs)
        computes_wrongly_here = is_for_all_devices or first_half.is_cpu
        to = choose(args, kwargs, _ANY_DEVICE_FP32) if computes_wrongly_here else None
        if to is None or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        if is_norm:
            result_dtype = widest_dtype((first_argument(args, kwargs),), {}, _ANY_DEVICE_FP32)
        else:
            result_dtype = widest_dtype(args, kwargs, _ANY_DEVICE_FP32)
        if result_dtype is None or result_dtype is to:
            return function(*args, **kwargs)
        float_kwargs = {name: fp32_weight_of(arg) for name, arg in kwargs.items()}
        cast_args, cast_kwargs = cast_arguments(
            map(fp32_weight_of, args), float_kwargs, to, _ANY_DEVICE_FP32
        )
        result = function(*cast_args, **cast_kwargs)
        if is_in_place:
            return first_argument(args, kwargs).copy_(result)
        return cast(result, result_dtype, _ANY_DEVICE_FP32)

    def fp32_weight_of(value: Any) -> Any:
        if isinstance(value, Tensor) and not is_dynamo_compiling() and thread_calls.stack:
            return state.fp32_weight_of(value) if value.numel() >= LARGE_WEIGHT else value
        return value

    return call_original


def _first_half_in(values: Sequence) -> Tensor | None:
    for tensor in tensors_in(values):
        if tensor.dtype in HALF_DTYPES:
            return tensor
    return None


def _needs_grad(args: tuple, kwargs: dict) -> bool:
    """Whether autograd may need this call for a backward pass.

    Always True in a trace or a transform, because `requires_grad` is not evidence there.  Under
    `no_grad`, True only in a jit trace, because `torch.jit.trace` runs the traced function again
    under `no_grad` and compares the results.
    """
    if not torch.is_grad_enabled():
        return not is_dynamo_compiling() and is_tracing()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return is_dynamo_compiling() or is_traced_or_transformed()


def with_fp32_kernels(
    name: str, choose: ChooseDtype, call_original: Callable | None
) -> tuple[ChooseDtype, Callable | None]:
    """Let the function `name` use a kernel that reads half tensors and computes in FP32.

    Accelerators have such kernels for some functions.  Then no FP32 copy is made.  Takes and
    returns the `choose` and the `call_original` of `wrapper.replacement`.
    """
    if name not in _FP32_KERNELS:
        return choose, call_original
    can_compute, compute = _FP32_KERNELS[name]

    def has_kernel(args: tuple, kwargs: dict, policy: Policy) -> bool:
        value = first_argument(args, kwargs)
        return (
            type(value) in PLAIN_TENSOR_TYPES
            and value.dtype in HALF_DTYPES
            and not value.is_cpu
            and not is_dynamo_compiling()  # a compiler fuses the cast
            and value.layout is torch.strided
            and policy.float_rows_to is torch.float32
            and policy.casts_on_device(value.device.type)
            and can_compute(*args, **kwargs)
        )

    def choose_without_kernel(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
        return None if has_kernel(args, kwargs, policy) else choose(args, kwargs, policy)

    def call_kernel(policy: Policy | None, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if policy is not None and has_kernel(args, kwargs, policy):
            return compute(function, *args, **kwargs)
        if call_original is None:
            return function(*args, **kwargs)
        return call_original(policy, function, *args, **kwargs)

    return choose_without_kernel, call_kernel


def _takes_dtype_argument(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """Whether the call gives no dtype, so that one can be added.  A None by position may be one."""
    return dtype is None and not any(arg is None or type(arg) is torch.dtype for arg in args)


def _call_with_fp32_dtype(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{**kwargs, "dtype": torch.float32})


def _has_class_indices(input: Tensor, target: Any, *others: Any, **named: Any) -> bool:
    if observers:  # observers see the call and its cast
        return False
    if named or len(others) != 4:  # not as F.cross_entropy calls it
        return False
    weight, _, _, label_smoothing = others
    is_index = isinstance(target, Tensor) and not target.is_floating_point()
    return is_index and target.shape != input.shape and weight is None and not label_smoothing


def _cross_entropy_of_indices(_: Callable, input: Tensor, target: Tensor, *others: Any) -> Any:
    reduction, ignore_index = others[1:3]
    log_probabilities = torch.ops.aten.log_softmax(input, min(1, input.dim() - 1), torch.float32)
    return torch.ops.aten.nll_loss_nd(log_probabilities, target, None, reduction, ignore_index)


# Not in the list: functions whose `dtype=` accepts no half input (matrix norms) or whose gradient
# is computed in half (cumsum).
_WITH_DTYPE_ARGUMENT = ("log_softmax", "softmax", "sum", "vector_norm")
_FP32_KERNELS: dict[str, tuple[Callable[..., bool], Callable]] = {  # (can_compute, compute)
    **dict.fromkeys(_WITH_DTYPE_ARGUMENT, (_takes_dtype_argument, _call_with_fp32_dtype)),
    "cross_entropy_loss": (_has_class_indices, _cross_entropy_of_indices),
}


def module_functions(state: CastState) -> list[tuple[str, str, MakeReplacement]]:
    """Patches of functions of torch's modules that check dtypes or autocast themselves."""
    return [
        ("torch.nn.RNNBase", "check_input", lambda original: _make_check_input(original, state)),
        (
            "torch.nn.functional",
            "multi_head_attention_forward",
            lambda original: opaque_attention(original, state),
        ),
        (
            "torch.backends.mha",
            "get_fastpath_enabled",
            lambda original: _make_get_fastpath_enabled(original, state),
        ),
    ]


def embedding_forwards() -> list[tuple[str, str, MakeReplacement]]:
    """Patches of the embedding forwards, which read the FP32 weight of a half copy."""
    return [(f"torch.nn.{cls.__name__}", "forward", _make_embedding_forward) for cls in EMBEDDINGS]


def _make_embedding_forward(original: Callable) -> Callable:
    """The replacement.  TorchScript compiles the source of `original`, with this module's `F`."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        params = self.__dict__.get(PARAMS_NAME)  # in a half model possibly `EmbeddingParameters`
        if type(params) is dict or getattr(params, "module", None) is not self:
            return original(self, *args, **kwargs)
        return params.look_up(original, args, kwargs)  # type: ignore[union-attr]

    return forward


def _make_get_fastpath_enabled(original: Callable, state: CastState) -> Callable:
    """The replacement of the function that returns whether attention may take a fused kernel.

    `nn.MultiheadAttention` and the encoder layers call it in eval mode before they take a fused
    kernel.  A fused kernel is one call, so no row would cast the functions inside it.  Where calls
    are cast, the replacement therefore returns False, as torch does under autocast.  If the policy
    has a condition, the replacement applies the condition to the tensors in its caller's Python
    frame and to the module's parameters.  Under Dynamo, neither the caller's frame nor the original
    is used: under any policy, the replacement returns False.
    """

    def get_fastpath_enabled() -> bool:
        if is_dynamo_compiling():
            return state.current_policy() is None and is_fast_path_enabled()
        policy = state.current_policy()
        if policy is None or not original():
            return original()
        if policy.condition is None:
            return False
        caller = sys._getframe(1).f_locals
        module = caller.get("self")
        with without_torch_function_modes_if_any(state):
            tensors = [value for value in caller.values() if isinstance(value, Tensor)]
            weights = module.parameters() if isinstance(module, nn.Module) else ()
            return not policy.condition((*tensors, *weights), {})

    return get_fastpath_enabled


def prepare_attention(policy: Policy, state: CastState) -> None:
    """Make the function that Dynamo's graphs call for attention under this policy."""
    policy.attention_in_graphs = _attention_under(policy, state)


def _attention_under(policy: Policy | None, state: CastState) -> Callable:
    def enter(call: Call) -> None:
        state.enter(call, None)
        state.set_policy(call, policy)

    def attention(*args: Any, **kwargs: Any) -> Any:
        return state.run_in_call(enter, F.multi_head_attention_forward, *args, **kwargs)

    return opaque_call(attention)


def opaque_attention(original: Callable, state: CastState) -> Callable:
    """Make the attention of `nn.MultiheadAttention` one opaque call in Dynamo's graphs.

    AOTAutograd runs that call later, outside of the model's forward.  So the call sets its policy.
    """
    without_casts = _attention_under(None, state)

    @functools.wraps(original)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        attention = original
        if state.has_thread_policies and is_dynamo_compiling():
            policy = thread_calls.policy
            if policy is None:
                attention = without_casts
            elif policy is not FOLLOWS_PROCESS and policy.attention_in_graphs is not None:
                attention = policy.attention_in_graphs
        return attention(*args, **kwargs)

    return multi_head_attention_forward


def _make_check_input(original: Callable, state: CastState) -> Callable:
    """Let RNNs accept an input that is to be cast to the dtype of the weights.

    The original raises if the input's dtype differs from the weights', before the input is cast.
    """

    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        policy = state.current_policy()
        if policy is not None:
            with without_torch_function_modes_if_any(state):
                weights = getattr(self, FLAT_WEIGHTS_NAME, None) or list(self.parameters())
                input = _as_if_cast(input, weights[0], policy)
        return original(self, input, batch_sizes)

    return check_input


def _as_if_cast(input: Tensor, weight: Tensor, policy: Policy) -> Tensor:
    """Return an input for `check_input`: in the dtype of `weight`, if both are to be cast."""
    if (
        input.dtype is not weight.dtype
        and is_castable(input, policy)
        and is_castable(weight, policy)
    ):
        return input.new_empty(input.shape, dtype=weight.dtype)
    return input
