"""HOT PATH: what a patched call does.

Every rule is a choice of dtype.  `replacement(original, rule, state)` returns
a plain function (torch.compile sees through plain functions; it silently
unwraps wrapt's proxies) that asks for the policy in force, casts the arguments
and calls the original.  Each Python call costs as much as a small kernel: what
an argument mostly is, is settled without one.

Never cast: `out=` calls, float64, complex, integer and bool tensors, tensors
on devices the policy does not cover.  Lists, tuples and namedtuples are cast
inside; the caller's containers are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..errors import BannedFunctionError
from .cast_observers import ObservedCall, observers
from .dtype_errors import note_call
from .handlers import Handled, hand_over, is_asked, is_mode_on, wants_to_see
from .policy import FOLLOW, CastState, Policy
from .recording import Recorded, by_itself, is_internal, proxy_of
from .tables import Rule

_CASTABLE = frozenset((torch.float32, torch.float16, torch.bfloat16))
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_TENSORS = frozenset((Tensor, Parameter))
_SCALARS = frozenset((int, float, bool, type(None), str, torch.dtype, complex, torch.Size))


class NoHalfKernel(Exception):
    """An argument is compressed sparse on the CPU, whose kernels know no half: FP32 it is."""


def cast(value: Any, to: torch.dtype, policy: Policy) -> Any:
    """`value` with its castable tensors in `to`; the same object where nothing changes."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        dtype = value.dtype
        if dtype is to or dtype not in _CASTABLE:
            return value
        if policy.devices is not None and value.device.type not in policy.devices:
            return value
        if value.layout is not torch.strided and _must_stay_float(value, to):
            raise NoHalfKernel
        if kind is Parameter and not is_dynamo_compiling():
            return policy.cache.cast(value, to)
        return value.to(to)
    if kind in _SCALARS:
        return value
    return _cast_uncommon(value, to, policy)


def _must_stay_float(value: Tensor, to: torch.dtype) -> bool:
    return to is not torch.float32 and value.layout in _COMPRESSED and value.is_cpu


def _cast_uncommon(value: Any, to: torch.dtype, policy: Policy) -> Any:
    if isinstance(value, (list, tuple)):
        inside, changed = [], False
        for item in value:
            new = item if type(item) in _SCALARS else cast(item, to, policy)
            changed = changed or new is not item
            inside.append(new)
        if not changed:
            return value
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    if isinstance(value, Tensor):
        if wants_to_see(value):
            raise Handled
        if castable(value, policy) and value.dtype is not to and not is_internal(value):
            return value.to(to)
        return value
    proxy = proxy_of(value)
    if proxy is not None:
        raise Recorded(proxy)
    if wants_to_see(value):
        raise Handled
    return value


def cast_call(args: Any, kwargs: dict, to: torch.dtype, policy: Policy) -> tuple[list, dict]:
    """New arguments with their castable tensors in `to`."""
    return (
        [cast(arg, to, policy) for arg in args],
        {name: cast(arg, to, policy) for name, arg in kwargs.items()},
    )


def call_in(
    to: torch.dtype, original: Callable, patched: Callable, args: Any, kwargs: dict, policy: Policy
) -> Any:
    """`original` with its arguments cast to `to`; where torch.fx records, `patched` recorded."""
    try:
        cast_args, cast_kwargs = cast_call(args, kwargs, to, policy)
    except Recorded as proxy:
        return proxy.record(patched, args, kwargs)
    except NoHalfKernel:
        cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, policy)
    return original(*cast_args, **cast_kwargs)


def castable(value: Tensor, policy: Policy) -> bool:
    """Whether the rules may touch this tensor at all."""
    if type(value) not in _TENSORS and wants_to_see(value):
        with torch._C.DisableTorchFunctionSubclass():  # our look at it is not the user's call
            return castable(value, policy)
    return value.dtype in _CASTABLE and (
        policy.devices is None or value.device.type in policy.devices
    )


def dtype_of(value: Tensor) -> torch.dtype:
    """A tensor's dtype, which no handler is asked for."""
    if type(value) not in _TENSORS and wants_to_see(value):
        with torch._C.DisableTorchFunctionSubclass():
            return value.dtype
    return value.dtype


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in an argument list, those in nested lists and tuples included."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found


def widest(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """The dtype PROMOTE casts to: the widest castable one, FP32 for two different half types."""
    dtypes = {
        dtype_of(value)
        for value in tensors_in((*args, *kwargs.values()))
        if castable(value, policy)
    }
    return dtypes.pop() if len(dtypes) == 1 else torch.float32 if dtypes else None


def _half(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    return policy.half_to


def _half_if_first(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    first = args[0] if args else kwargs.get("input")
    is_other = isinstance(first, Tensor) and not castable(first, policy)
    return None if is_other else policy.half_to


def _float(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    return policy.float_to


def _single(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    """FP32 even under `precision("half")`, for what has no kernel for half."""
    return torch.float32


def _float_unless_dtype(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    if kwargs.get("dtype") is not None or any(type(arg) is torch.dtype for arg in args):
        return None
    return policy.float_to


def _float_unless_same_size(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    tensor, *size = (*args, *kwargs.values())
    wanted = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    is_same = isinstance(tensor, Tensor) and tensor.shape == tuple(wanted)
    return None if is_same and wanted else policy.float_to  # a size of () sums in any case


def _widest_unless_scalar(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    if any(value.dim() == 0 for value in tensors_in((*args, *kwargs.values()))):
        return None
    return widest(args, kwargs, policy)


def _like_first(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    first = args[0] if args else kwargs.get("input")
    is_ours = isinstance(first, Tensor) and castable(first, policy)
    return dtype_of(first) if is_ours else None


def _apex_float(args: tuple, kwargs: dict, policy: Policy) -> torch.dtype | None:
    return policy.float_to if policy.apex_flavour else None


CHOOSERS: dict[Rule, Callable[[tuple, dict, Policy], torch.dtype | None]] = {
    Rule.HALF: _half,
    Rule.HALF_IF_FIRST: _half_if_first,
    Rule.FLOAT: _float,
    Rule.FLOAT_UNLESS_DTYPE: _float_unless_dtype,
    Rule.FLOAT_UNLESS_SAME_SIZE: _float_unless_same_size,
    Rule.PROMOTE: widest,
    Rule.PROMOTE_UNLESS_SCALAR: _widest_unless_scalar,
    Rule.LIKE_FIRST: _like_first,
}
BEYOND_CHOOSERS = {**CHOOSERS, Rule.FLOAT: _single}
APEX_CHOOSERS = {Rule.FLOAT: _apex_float}


def replacement(
    original: Callable, choose: Callable, state: CastState, installed: Callable | None = None
) -> Callable:
    """A plain function that stands in for `original` and casts to what `choose` says.

    `installed` is what torch has in its place, if that is not the function itself.
    """
    is_half, is_float = choose is _half, choose is _float
    by_object = by_itself(original)

    def patched(*args: Any, **kwargs: Any) -> Any:
        policy, call = state.process, original
        if state.overridden:  # as `state.current()`, without the price of a call
            if state.modes and not is_dynamo_compiling() and is_mode_on():
                return hand_over(state, recorded, original, args, kwargs)
            own = state.thread.policy
            if own is not FOLLOW:
                policy = own
                if is_dynamo_compiling():
                    call = by_object
            if observers and not is_dynamo_compiling():
                call = ObservedCall(original, args, kwargs)
        if (
            policy is None
            or ("out" in kwargs and kwargs["out"] is not None)
            or (policy.gate is not None and not policy.gate(args, kwargs))
        ):
            for arg in (*args, *kwargs.values()) if kwargs else args:
                kind = type(arg)
                if not (kind in _TENSORS or kind in _SCALARS) and is_asked(args, kwargs):
                    return hand_over(state, recorded, original, args, kwargs)
            return call(*args, **kwargs)
        if policy.special:
            if is_asked(args, kwargs):
                return hand_over(state, recorded, original, args, kwargs)
            to = policy.special.get(original)
            return overridden(call, to, choose, recorded, args, kwargs, policy, state)
        if is_half:
            to = policy.half_to
        elif is_float:
            to = policy.float_to
        else:
            to = choose(args, kwargs, policy)
            if to is None:
                if is_asked(args, kwargs):
                    return hand_over(state, recorded, original, args, kwargs)
                return call(*args, **kwargs)
        try:
            cast_args = []
            for arg in args:
                kind = type(arg)
                if kind is tuple:  # of numbers, mostly: a shape, a stride
                    for item in arg:
                        if type(item) not in _SCALARS:
                            arg = cast(arg, to, policy)
                            break
                elif not (kind in _SCALARS or (kind in _TENSORS and arg.dtype is to)):
                    arg = cast(arg, to, policy)
                cast_args.append(arg)
            cast_kwargs = {}
            for name, arg in kwargs.items():
                cast_kwargs[name] = arg if type(arg) in _SCALARS else cast(arg, to, policy)
        except Handled:
            return hand_over(state, recorded, original, args, kwargs)
        except Recorded as proxy:
            return proxy.record(recorded, args, kwargs)
        except NoHalfKernel:
            cast_args, cast_kwargs = cast_call(args, kwargs, torch.float32, policy)
        try:
            return call(*cast_args, **cast_kwargs) if cast_kwargs else call(*cast_args)
        except RuntimeError as error:
            note_call(error, recorded, args, kwargs, to)
            raise

    recorded = patched if installed is None else installed
    return patched


def overridden(
    original: Callable,
    to: torch.dtype | None,
    choose: Callable,
    patched: Callable,
    args: Any,
    kwargs: dict,
    policy: Policy,
    state: CastState,
) -> Any:
    """A patched call under a policy with overrides of functions; `to` is this one's, if any.

    Casts are off inside an overridden function: the rows of what it calls itself
    (F.softmax calls Tensor.softmax) would have the last word.
    In a model without casts (O2, O3) the code around the call expects the dtype
    it put in, so that the result goes back to the widest of the arguments.
    """
    if to is None:
        to = choose(args, kwargs, policy) if policy.follows_tables else None
        return (
            original(*args, **kwargs)
            if to is None
            else call_in(to, original, patched, args, kwargs, policy)
        )
    with state.under(lambda: None):
        output = call_in(to, original, patched, args, kwargs, policy)
    found = None if policy.follows_tables else widest(args, kwargs, policy)
    if found is None:
        return output
    after = cast(output, found, policy)
    if isinstance(original, ObservedCall):
        original.note_casts(output, after)
    return after


def banned(original: Callable, choose: Callable, state: CastState) -> Callable:
    """FLOAT, or an error where the policy does not allow it, for calls with half arguments."""

    def patched(*args: Any, **kwargs: Any) -> Any:
        policy = state.table_policy()
        if policy is None or not _has_half(args, kwargs, policy):
            call = ObservedCall(original, args, kwargs) if observers else original
            return call(*args, **kwargs)
        choose(policy)
        return floated(*args, **kwargs)

    floated = replacement(original, _float, state)
    return patched


def refuse(message: str, warn: Callable[[str], None]) -> Callable[[Policy], None]:
    """What `banned` does with a half call: raise `message`, or `warn` of it once and go on."""

    def decide(policy: Policy) -> None:
        if not policy.allow_banned:
            raise BannedFunctionError(message)
        warn(message)

    return decide


def _has_half(args: tuple, kwargs: dict, policy: Policy) -> bool:
    return any(
        value.dtype in (torch.float16, torch.bfloat16) and castable(value, policy)
        for value in tensors_in((*args, *kwargs.values()))
    )
