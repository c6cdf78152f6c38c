"""Which operator made a non-finite value: checks the outputs of every operator.

A non-finite output is traced to its origin, the first operator whose inputs were finite.  Values
keep their origin through views, casts and other operators, also from the forward into the backward
pass.  An inf that the user's code writes, such as the -inf of a mask, is marked.  It is reported
only if an operator turns it into a NaN.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampatch.torch_private import custom_ops, dispatch_modes
from ampatch.torch_private.foreach import FOREACH_COPY

from .float64 import max_in_float64
from .tensors import ByStorage, storage_key, values

CHECKED_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
OVERWRITING_FUNCTIONS = ("copy_", FOREACH_COPY)  # they do not read their first argument
MAX_NODES = 200_000  # nodes of the graph whose line of code is remembered
_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


class CallSite(NamedTuple):
    """The module and the line of the user's code in which a forward operator ran."""

    module: nn.Module | None
    code: CodeType | None
    line: int


@dataclasses.dataclass
class Origin:
    """The operator that made the first non-finite value of a tensor or of its ancestors.

    `max_in_float64` is the largest magnitude of its result in float64: inf if that is not
    finite either, None outside of the backward pass or if it could not be computed.
    """

    operator: str
    phase: str
    call_site: CallSite
    dtype: torch.dtype
    value: str
    largest_input: float | None
    input_is_finite: bool
    is_written: bool  # an inf that the user's code writes
    order: int
    max_in_float64: float | None = None

    def at_scale_1(self, scaler: Any) -> float | None:
        """The largest magnitude of the operator's result at loss scale 1, or None if unknown.

        Gradients are proportional to the scale.  `scaler` is the scaler of the open `scale_loss`
        block, or None outside of a block.  Reading its scale synchronizes with the device.
        """
        if scaler is None or self.max_in_float64 is None:
            return None
        return self.max_in_float64 / scaler.get()

    def is_absorbed(self, scaler: Any) -> bool:
        """Whether the result is finite at the smallest scale, 1 or the scaler's own minimum.

        Also True if the result could not be computed again: if the value stays non-finite, it is
        reported at the smallest scale.
        """
        if self.phase != "backward" or scaler is None or not scaler.is_dynamic:
            return False
        scale, lowest = scaler.get(), max(1.0, scaler.settings.min_loss_scale)
        if scale <= lowest:
            return False
        largest_at_lowest = (self.max_in_float64 or 0.0) * lowest / scale
        return largest_at_lowest <= torch.finfo(self.dtype).max


class OriginTracker(dispatch_modes.TorchDispatchMode):
    """Checks the output of each operator of this thread, from `enter` to `leave`.

    `current()` returns the phase outside of backward ("forward" or "step") and the running module
    or None.
    """

    def __init__(self, current: Callable[[], tuple[str, nn.Module | None]]) -> None:
        super().__init__()
        self._current = current
        self._is_active = False
        self._origins: ByStorage[Origin] = ByStorage()
        self._call_sites: dict[int, CallSite] = {}  # by the sequence number of the node
        self._count = 0

    def enter(self) -> None:
        self._is_active = True
        self.__enter__()

    def leave(self) -> None:
        """Stop checking, even while modes entered later are active."""
        self._is_active = False
        self._call_sites.clear()  # call sites hold modules
        self._origins = ByStorage()
        dispatch_modes.exit_mode(self)  # in another thread the mode stays and does nothing

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """The origin of the non-finite values in a tensor, or None if no operator was seen."""
        return self._origins.get(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_active:
            return func(*args, **kwargs)
        phase, call_site = self._phase_and_call_site()
        mutates = custom_ops.is_mutable(func)
        inputs = list(_tensors_read(func, args, kwargs))
        inputs_before = self._inspect(inputs) if mutates else None
        result = func(*args, **kwargs)
        outputs = list(_tensors((result, args, kwargs) if mutates else result))
        for output in outputs:
            if not is_finite(output):
                inputs_before = inputs_before or self._inspect(inputs)
                self._trace(func, phase, call_site, output, inputs_before, (args, kwargs))
        return result

    def _phase_and_call_site(self) -> tuple[str, CallSite]:
        phase, module = self._current()
        is_backward, number = dispatch_modes.running_backward_node()
        if is_backward and module is None:
            return "backward", self._call_sites.get(number, CallSite(None, None, 0))
        call_site = CallSite(module, *_user_line())
        # If this operator has a node, it is the newest one.
        self._call_sites.setdefault(dispatch_modes.newest_node(), call_site)
        if len(self._call_sites) > MAX_NODES:
            del self._call_sites[next(iter(self._call_sites))]
        return phase, call_site

    def _inspect(self, inputs: list[Tensor]) -> _InputFacts:
        non_finite = [tensor for tensor in inputs if not is_finite(tensor)]
        origins = [self._origins.get(tensor) for tensor in non_finite]
        return _InputFacts(
            largest=largest(inputs),
            has_nan=any(bool(torch.isnan(values(tensor)).any()) for tensor in non_finite),
            from_outside={
                storage_key(t) for t, origin in zip(non_finite, origins) if origin is None
            },
            is_finite=not non_finite,
            origins=[origin for origin in origins if origin is not None],
        )

    def _trace(
        self,
        func: Any,
        phase: str,
        call_site: CallSite,
        output: Tensor,
        inputs_before: _InputFacts,
        arguments: Any,
    ) -> None:
        if storage_key(output) in inputs_before.from_outside and not custom_ops.is_mutable(func):
            return  # a view of a tensor from outside: no operator made the value
        value = "nan" if bool(torch.isnan(values(output)).any()) else "inf"
        computed = [origin for origin in inputs_before.origins if not origin.is_written]
        written = [origin for origin in inputs_before.origins if origin.is_written]
        if computed:
            origin = min(computed, key=lambda origin: origin.order)
        elif written and (value == "inf" or inputs_before.has_nan):
            origin = written[0]
        else:
            self._count += 1
            origin = Origin(
                operator=f"{func.namespace}.{custom_ops.base_name(func)}",
                phase=phase,
                call_site=call_site,
                dtype=output.dtype,
                value=value,
                largest_input=inputs_before.largest,
                input_is_finite=inputs_before.is_finite,
                is_written=value == "inf" and any(map(math.isinf, _python_floats(arguments))),
                order=self._count,
                max_in_float64=_max_in_float64(func, arguments, inputs_before)
                if phase == "backward"
                else None,
            )
        self._origins.set(output, origin)


@dataclasses.dataclass
class _InputFacts:
    """An operator's inputs before it ran; `from_outside`: storages without a known origin."""

    largest: float | None
    has_nan: bool
    from_outside: set[int]
    is_finite: bool
    origins: list[Origin]


def _max_in_float64(
    func: Any, arguments: tuple[tuple, dict], inputs_before: _InputFacts
) -> float | None:
    # An inf among the inputs is of the user's code, or of an operator that was not seen.
    if not inputs_before.is_finite:
        return math.inf if inputs_before.origins else None
    if custom_ops.base_name(func) in OVERWRITING_FUNCTIONS:
        return inputs_before.largest
    return max_in_float64(func, *arguments)


def is_finite(tensor: Tensor) -> bool:
    """Whether every element of a tensor is finite."""
    return bool(torch.isfinite(values(tensor.detach())).all())


def largest(tensors: list[Tensor]) -> float | None:
    """The largest finite magnitude in all tensors, or None if there is none."""
    maxima = []
    for tensor in tensors:
        elements = values(tensor.detach())
        finite = elements[torch.isfinite(elements)]
        if finite.numel():
            maxima.append(finite.abs().max().item())
    return max(maxima, default=None)


def _tensors_read(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The tensors that an operator reads, without those that it only writes."""
    yield from _tensors(args[1:] if custom_ops.base_name(func) in OVERWRITING_FUNCTIONS else args)
    outs = custom_ops.out_arguments(func)
    yield from _tensors([value for name, value in kwargs.items() if name not in outs])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter)
        if is_plain and value.dtype in CHECKED_DTYPES and not value.is_meta:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _python_floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _python_floats(item)
    elif isinstance(value, dict):
        yield from _python_floats(list(value.values()))


def _user_line() -> tuple[CodeType | None, int]:
    """The innermost line of code that is neither torch's nor ampatch's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
