"""The rules: the dtype that each rule chooses for a call, and how values are cast.

Float64, complex, integer and bool tensors, and tensors on devices that the policy does not cover,
are never cast.  Tensors in lists, tuples and namedtuples are cast into new containers, and the
caller's containers are unchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..errors import BannedFunctionError
from ..log import logger
from ..torch_private.dtensors import is_dtensor
from ..torch_private.modules import are_flat_weights
from ..torch_private.probes import is_traced_or_transformed
from ..torch_private.torch_functions import no_torch_function
from ..torch_private.tracing_tensors import is_internal_tracing_tensor
from .arguments import tensors_in
from .handlers import HasHandler, any_has_handler, has_handler
from .policy import Policy
from .tables import Rule

ChooseDtype = Callable[[tuple, dict, Policy], "torch.dtype | None"]
"""Returns the dtype to which the tensors of a call `(args, kwargs)` are cast; None for no cast."""

PLAIN_TENSOR_TYPES = frozenset((Tensor, Parameter))
NON_TENSOR_TYPES = frozenset((int, float, bool, type(None), str, torch.dtype, complex, torch.Size))

CASTABLE_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))  # no float64 or float8
_COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class _NoHalfKernel(Exception):
    """A compressed sparse argument on the CPU, where its kernels accept only FP32."""


def cast(value: Any, to: torch.dtype, policy: Policy) -> Any:
    """Return `value` with its castable tensors in `to`, or `value` itself if none changes."""
    cls = type(value)
    if cls is Tensor or cls is Parameter:
        dtype = value.dtype
        if dtype is to or dtype not in CASTABLE_DTYPES:
            return value
        if policy.devices is not None and value.device.type not in policy.devices:
            return value
        if value.layout is not torch.strided and _has_no_half_kernel(value, to):
            raise _NoHalfKernel
        if cls is Parameter and not is_dynamo_compiling():
            return policy.cache.cast(value, to)
        if torch.is_grad_enabled() or not value.requires_grad:  # inlined `_cast_tensor`
            return value.to(to)
        return _cast_tensor(value, to)
    if cls in NON_TENSOR_TYPES:
        return value
    return _cast_uncommon(value, to, policy)


def _cast_tensor(value: Tensor, to: torch.dtype) -> Tensor:
    """The result requires a gradient if `value` does, even under `no_grad`: see `cast_weights`."""
    if torch.is_grad_enabled() or not value.requires_grad:
        return value.to(to)
    with torch.enable_grad():
        return value.to(to)


def _has_no_half_kernel(value: Tensor, to: torch.dtype) -> bool:
    return to is not torch.float32 and value.layout in _COMPRESSED_LAYOUTS and value.is_cpu


def _cast_uncommon(value: Any, to: torch.dtype, policy: Policy) -> Any:
    if isinstance(value, (list, tuple)):
        if NON_TENSOR_TYPES.issuperset(map(type, value)):  # sizes, strides
            return value
        if type(value) is list and _is_flat_rnn_weights(value, to, policy):
            return list(policy.cache.cast_flat_weights(value, to))
        inside = []
        changed = False
        for item in value:
            new = item if type(item) in NON_TENSOR_TYPES else cast(item, to, policy)
            changed = changed or new is not item
            inside.append(new)
        if not changed:
            return value
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    if isinstance(value, Tensor):
        if has_handler(value):
            raise HasHandler
        if (
            is_castable(value, policy)
            and value.dtype is not to
            and not is_internal_tracing_tensor(value)
        ):
            if not is_dynamo_compiling() and is_dtensor(value):  # the weights of tensor parallel
                return policy.cache.cast(value, to) if value.is_leaf else value.to(to)
            return _cast_tensor(value, to)
        return value
    if has_handler(value):
        raise HasHandler
    return value


def _is_flat_rnn_weights(values: list, to: torch.dtype, policy: Policy) -> bool:
    """Whether these are an RNN's flattened weights (one storage, for cuDNN), to be cast to half."""
    return (
        to is not torch.float32
        and not is_dynamo_compiling()
        and are_flat_weights(values)
        and not is_traced_or_transformed()
        and values[0].dtype is torch.float32
        and policy.casts_on_device(values[0].device.type)
    )


def cast_arguments(args: Any, kwargs: dict, to: torch.dtype, policy: Policy) -> tuple[list, dict]:
    """Return arguments with their castable tensors in `to`, or in FP32 if no kernel takes half."""
    cast_args = []  # in a loop: a comprehension is a Python call before 3.12
    cast_kwargs = kwargs
    try:
        for arg in args:
            cast_args.append(arg if type(arg) in NON_TENSOR_TYPES else cast(arg, to, policy))
        if kwargs:
            cast_kwargs = {name: cast(arg, to, policy) for name, arg in kwargs.items()}
        return cast_args, cast_kwargs
    except _NoHalfKernel:
        return cast_arguments(args, kwargs, torch.float32, policy)


def dtype_and_device(value: Tensor) -> tuple[torch.dtype, str]:
    """A tensor's dtype and device type, read without a call of its `__torch_function__`."""
    if type(value) not in PLAIN_TENSOR_TYPES and has_handler(value):
        with no_torch_function():
            return value.dtype, value.device.type
    return value.dtype, value.device.type


def is_castable(value: Tensor, policy: Policy) -> bool:
    """Whether rules may cast this tensor at all."""
    dtype, device = dtype_and_device(value)
    return dtype in CASTABLE_DTYPES and policy.casts_on_device(device)


def dtype_of(value: Tensor) -> torch.dtype:
    """A tensor's dtype, read without `__torch_function__`."""
    return dtype_and_device(value)[0]


def widest_dtype(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """Return the widest castable dtype (FP32 for two half dtypes), or None if none is castable."""
    return _widest_and_mixed(args, kwargs, policy)[0]


def _promote(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """Return `widest_dtype`, or None if all tensors already have one dtype."""
    dtype, are_mixed = _widest_and_mixed(args, kwargs, policy)
    return dtype if are_mixed else None


def _widest_and_mixed(args: tuple, kwargs: dict, policy: Policy) -> tuple[torch.dtype | None, bool]:
    """The widest castable dtype, and whether there are several castable dtypes."""
    first_dtype = None
    for value in tensors_in((*args, *kwargs.values()) if kwargs else args):
        dtype = value.dtype if type(value) in PLAIN_TENSOR_TYPES else dtype_of(value)
        if dtype is not first_dtype and dtype in CASTABLE_DTYPES and is_castable(value, policy):
            if first_dtype is not None:
                return torch.float32, True
            first_dtype = dtype
    return first_dtype, False


def choose_half(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    return policy.half_rows_to


def _contraction(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For `torch._VF.einsum(equation, operands)`: see `_chooser_for_equation`."""
    equation = args[0] if args else kwargs["equation"]
    choose = _chooser_for_equation.__wrapped__ if is_dynamo_compiling() else _chooser_for_equation
    return choose(equation)(args, kwargs, policy)


@functools.lru_cache(maxsize=1024)
def _chooser_for_equation(equation: str) -> ChooseDtype:
    """HALF if each operand shares a summed index, FLOAT for other sums, else the widest dtype."""
    inputs, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    operands = [set(labels) for labels in inputs.split(",")]
    kept = set(output) if arrow else {"."} | {label for label in inputs if inputs.count(label) == 1}
    shared = [
        label for label in set(inputs) - kept if sum(label in labels for labels in operands) > 1
    ]
    if all(labels.intersection(shared) for labels in operands):
        return choose_half
    return choose_float if any(labels - kept for labels in operands) else widest_dtype


def _power(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For `matrix_power(A, n)`: half for n > 1.

    A negative n needs an inverse, which has no half kernel.  For 0 and 1, nothing is multiplied.
    """
    n = args[1] if len(args) > 1 else kwargs.get("n", 1)
    return None if n in (0, 1) else policy.half_rows_to if n > 1 else torch.float32


def choose_float(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    return policy.float_rows_to


def _float_on_cpu(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """FP32 if any tensor is on the CPU; else the widest dtype, like PROMOTE."""
    for value in tensors_in((*args, *kwargs.values())):
        if dtype_and_device(value)[1] == "cpu":
            return torch.float32
    return widest_dtype(args, kwargs, policy)


def _float_on_cpu_unless_sparse(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For `torch.embedding` and `torch.embedding_bag`, whose `sparse` is argument 5 or 6."""
    is_sparse = kwargs.get("sparse") or any(arg is True for arg in args[4:6])
    return (widest_dtype if is_sparse else _float_on_cpu)(args, kwargs, policy)


def _float_on_cpu_if_vector(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For `index_select`, `index_add` and `repeat_interleave` of an input with at most one dim."""
    value = first_argument(args, kwargs)
    is_vector = isinstance(value, Tensor) and value.dim() < 2
    return _float_on_cpu(args, kwargs, policy) if is_vector else None


def _float_on_cpu_if_adding(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For `put`, `index_put` and the gradient of `pad`, where an element may get many addends."""
    for arg in (*args, *kwargs.values()):
        if arg is True or (type(arg) is str and arg == "replicate"):
            return _float_on_cpu(args, kwargs, policy)
    return None


def _float_on_cpu_if_half_weight(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For `batch_norm` and `instance_norm`.

    Half running statistics stay half, because the call writes into them.
    """
    weight = args[1:2] or (kwargs.get("weight"),)
    mean = args[3:4] or (kwargs.get("running_mean"),)
    if not _has_half(weight, {}, policy) or _has_half(mean, {}, policy):
        return None
    return _float_on_cpu(args, kwargs, policy)


_MAX_ADDENDS_IN_HALF = 16  # the sum of that many half values is off by few roundings
_MAX_WINDOW_ELEMENTS = 65_504  # the largest float16: some kernels count a window's elements in it


def _float_on_cpu_if_overlapping(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For pooling: FP32 on the CPU if an element lies in many windows.

    Each window adds to the element's gradient.  A size given as one int holds for every dimension.
    """
    value = first_argument(args, kwargs)
    size = kwargs.get("kernel_size", kwargs.get("output_size"))
    size = args[1] if len(args) > 1 else size
    stride = args[2] if len(args) > 2 else kwargs.get("stride")
    dims = [len(n) for n in (size, stride) if isinstance(n, (list, tuple)) and len(n) > 1]
    ndim = dims[0] if dims else min(3, value.dim() - 1)
    window = _per_dim(size, ndim)
    if "output_size" in kwargs or (len(args) == 2 and not kwargs):  # the number of windows
        lengths = value.shape[value.dim() - ndim :]
        counts = [1 if out is None else out // max(n, 1) + 1 for out, n in zip(window, lengths)]
    else:
        strides = _per_dim(stride, ndim) if stride else window
        counts = [-(-width // max(step, 1)) for width, step in zip(window, strides)]
        counts += [_MAX_ADDENDS_IN_HALF + 1] if math.prod(window) > _MAX_WINDOW_ELEMENTS else []
    return _float_on_cpu(args, kwargs, policy) if math.prod(counts) > _MAX_ADDENDS_IN_HALF else None


def _per_dim(size: Any, ndim: int) -> list:
    sizes = list(size) if isinstance(size, (list, tuple)) else [size]
    return sizes if len(sizes) == ndim else sizes[:1] * ndim


def first_argument(args: tuple, kwargs: dict) -> Any:
    """The first argument of a call."""
    return args[0] if args else kwargs.get("input")


def _float32(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """FP32 even under `precision("half")`, for functions without a half kernel."""
    return torch.float32


def _float_unless_dtype(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    if kwargs.get("dtype") is not None or any(type(arg) is torch.dtype for arg in args):
        return None
    return policy.float_rows_to


def _like_first(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    value = first_argument(args, kwargs)
    if isinstance(value, Tensor) and is_castable(value, policy):
        return dtype_of(value)
    return None


def no_rule(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """For functions without a rule: only an override casts them."""
    return None


def with_overrides(
    function: Any, choose: ChooseDtype
) -> tuple[ChooseDtype, Callable[[Policy], bool]]:
    """Return a rule and a predicate for a function of torch that policies may override.

    The rule is the policy's own for `function`, or `choose` if the policy has none.  The predicate
    returns whether a policy has one.
    """

    def choose_overridden(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
        return policy.functions.get(function, choose)(args, kwargs, policy)

    return choose_overridden, lambda policy: function in policy.functions


def banned(message: str) -> ChooseDtype:
    """The rule BANNED: a call with half arguments raises `message`.

    With `allow_banned`, it runs in FP32, and `message` is logged once.
    """
    warned: list[str] = []

    def choose(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
        if not _has_half(args, kwargs, policy):
            return None
        if not policy.allow_banned:
            raise BannedFunctionError(message)
        if not warned:
            warned.append(message)
            logger.warning(
                "%s It runs in FP32; pass allow_banned=False to have it refused.", message
            )
        return policy.float_rows_to

    return choose


def banned_in_place(message: str) -> ChooseDtype:
    """The rule REFUSE_IN_PLACE: a call whose first argument is half raises `message`."""

    def choose(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
        if _has_half(args[:1], {}, policy):
            raise BannedFunctionError(message)
        return None

    return choose


def _has_half(args: tuple, kwargs: dict, policy: Policy) -> bool:
    """Whether a castable argument is half.

    False if an argument's `__torch_function__` has yet to handle the call.
    """
    return not any_has_handler(args, kwargs) and any(
        value.dtype in (torch.float16, torch.bfloat16) and is_castable(value, policy)
        for value in tensors_in((*args, *kwargs.values()))
    )


CHOOSERS: dict[Rule, ChooseDtype] = {
    Rule.HALF: choose_half,
    Rule.CONTRACTION: _contraction,
    Rule.POWER: _power,
    Rule.FLOAT: choose_float,
    Rule.FLOAT_ON_CPU: _float_on_cpu,
    Rule.FLOAT_ON_CPU_UNLESS_SPARSE: _float_on_cpu_unless_sparse,
    Rule.FLOAT_ON_CPU_IF_VECTOR: _float_on_cpu_if_vector,
    Rule.FLOAT_ON_CPU_IF_ADDING: _float_on_cpu_if_adding,
    Rule.FLOAT_ON_CPU_IF_HALF_WEIGHT: _float_on_cpu_if_half_weight,
    Rule.FLOAT_ON_CPU_IF_OVERLAPPING: _float_on_cpu_if_overlapping,
    Rule.FLOAT_UNLESS_DTYPE: _float_unless_dtype,
    Rule.PROMOTE: _promote,
    Rule.LIKE_FIRST: _like_first,
}
BEYOND_CHOOSERS = {**CHOOSERS, Rule.FLOAT: _float32}
"""For the rows of `BEYOND`: their FLOAT is FP32 even under `precision("half")`."""
OVERRIDES: dict[str, ChooseDtype] = {"float": _float32, "half": choose_half}
