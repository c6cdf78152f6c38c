"""The inputs of a half model: cast, except for values that half would lose.

A forward may write into what it was given.  A container in which nothing is cast is passed on as
it is; a container with a cast tensor is copied.  What the forward writes into a copy, or in place
into a cast input, is written back into the caller's object when the forward ends, in the graph
where there is one.  A tensor that is given twice is cast once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..config.opt_levels import HALF_TYPES
from ..log import logger
from ..torch_private.devices import has_values, is_captured
from ..torch_private.probes import is_recording
from .values import CASTABLE, caster, half_cannot_hold, is_strided, map_tensors, numbers_of

WHOLE = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_fitting_copy = getattr(native.part, "fitting_copy", None)
"""`(tensor, dtype, limit)`: the copy of a small tensor with values within the limit; or None."""


class Given:
    """What one forward was given: the caller's own, and what the forward got instead."""

    tensors: dict[int, tuple[Tensor, Tensor, Any]]  # by id: own, cast, the node of the cast
    containers: list[tuple[Any, Any, Any]]  # own, copy, the items that the copy began with

    def write_back(self) -> None:
        """The forward has ended: write what it wrote into its inputs into the caller's own."""
        for own, cast, node in self.tensors.values():
            # An inference tensor cannot be written outside of that mode, and its cast begins with
            # a version of 1.  In that mode casts have no version.
            if not (own.is_inference() or cast.is_inference()) and cast._version:
                _write_into(own, cast, in_graph=cast.grad_fn is not node)
        if self.containers:
            owns = {id(cast): own for own, cast, _ in self.tensors.values()}
            owns |= {id(copy): own for own, copy, _ in self.containers}
            for own, copy, put in self.containers:
                _write_back(own, copy, put, owns)


class ModelInputs:
    """Casts the inputs of one model to `dtype`; `name` is for the log.

    An FP32 input that half cannot hold (finite values that overflow, whole numbers that it
    cannot count) stays FP32, at that position from then on, after `keeps_float()` has been
    called.  Inputs in host memory are looked at each time; on an accelerator, where a look
    waits for the device, at a position's first input only: later ones are clamped to the
    range of float16.

    Annotations stay FP32 too: a list of dicts with whole numbers, as detectors of torchvision and
    transformers take them.  bfloat16 moves a box at 1,000 pixels by up to 4.
    """

    def __init__(self, name: str, dtype: torch.dtype, keeps_float: Callable[[], None]) -> None:
        self._name = name
        self._dtype = dtype
        self._is_half = dtype in HALF_TYPES
        self._saturates = dtype is torch.float16
        self._limit = 2 / torch.finfo(dtype).eps
        self._keeps_float = keeps_float
        self._float_positions: set[int] = set()
        self._seen_positions: set[int] = set()

    def take(self, args: tuple, kwargs: dict, given: Given | None) -> tuple[tuple, dict]:
        """The arguments for the forward; `given` notes what to write back after it."""
        if given is not None:
            given.tensors, given.containers = {}, []
        if given is None or is_recording():  # traced by Dynamo, or by another recorder
            convert = self._saturated if self._saturates else caster(self._dtype)
            return map_tensors(args, convert), map_tensors(kwargs, convert)
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            return (self._cast(args[0], 0, given),), kwargs
        position = -1

        def convert_next(tensor: Any) -> Any:
            nonlocal position
            position += 1
            return self._cast(tensor, position, given)

        def converted(value: Any) -> Any:
            if type(value) in (list, tuple) and _are_annotations(value):
                self._keeps_float()
                return value
            return map_tensors(value, convert_next, given.containers)

        args = tuple(map(converted, args))
        if kwargs:
            kwargs = {name: converted(value) for name, value in kwargs.items()}
        return args, kwargs

    def _cast(self, tensor: Tensor, position: int, given: Given) -> Tensor:
        """In C++: `fitting_copy` of `copies.h`."""
        found = tensor.dtype
        if found is self._dtype or found not in CASTABLE:
            return tensor
        if id(tensor) in given.tensors:
            return given.tensors[id(tensor)][1]
        cast = None
        if found is torch.float32 and self._is_half:
            if position in self._float_positions:
                return tensor
            if _fitting_copy is not None and type(tensor) is Tensor:
                cast = _fitting_copy(tensor, self._dtype, self._limit)
            if cast is None and self._stays_float(tensor, position):
                return tensor
        if cast is None:  # the first one, too, is clamped: its recompute is a later one
            saturates = self._saturates and not tensor.is_cpu and is_strided(tensor)
            cast = self._saturated(tensor) if saturates else tensor.to(self._dtype)
        self._seen_positions.add(position)
        given.tensors[id(tensor)] = (tensor, cast, cast.grad_fn)
        return cast

    def _stays_float(self, tensor: Tensor, position: int) -> bool:
        if not tensor.is_cpu and (
            position in self._seen_positions or not has_values(tensor.device) or is_captured(tensor)
        ):
            return False
        numbers: Any = tensor.detach() if tensor.requires_grad else tensor
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            numbers = numbers_of(tensor)
        if numbers is None or not numbers.numel():
            return False
        smallest, largest = torch.aminmax(numbers)
        if type(smallest) is not Tensor:  # some mode of the caller's computes without values
            return False
        low: Any = smallest.tolist()
        high: Any = largest.tolist()
        if -self._limit < low and high < self._limit:
            return False
        if not half_cannot_hold(numbers, self._dtype):
            return False
        self._float_positions.add(position)
        logger.warning(
            "%s: an input of shape %s has values that %s cannot hold (from %g to %g). This input "
            "stays FP32, here and in later forwards.",
            self._name,
            "(nested)" if tensor.is_nested else tuple(tensor.shape),
            self._dtype,
            low,
            high,
        )
        self._keeps_float()
        return True

    def _saturated(self, tensor: Any) -> Any:
        """`tensor` in float16, finite values that are too large clamped to its range."""
        if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float32:
            return caster(self._dtype)(tensor)
        largest = torch.finfo(self._dtype).max
        clamped = torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))
        return clamped.to(self._dtype)


def _are_annotations(values: Sequence) -> bool:
    """Whether these are dicts with whole numbers: the labels of an image's boxes and masks."""
    return bool(values) and all(
        isinstance(value, Mapping)
        and any(isinstance(one, Tensor) and one.dtype in WHOLE for one in value.values())
        for value in values
    )


def _write_into(own: Tensor, cast: Tensor, in_graph: bool) -> None:
    """Write into `own` what a forward has written into its cast; the rest keeps its FP32 values.

    `in_graph`, if the write was in the graph, as it would be in FP32: gradients of the written
    tensor pass through what the forward has done.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and in_graph):
        new = cast.to(own.dtype)
        if is_strided(own):
            stays = (own.detach().to(cast.dtype) == cast) & own.isfinite()
            new = new + torch.where(stays, own.detach() - new.detach(), 0)
        own.copy_(new)


def _write_back(own: Any, copy: Any, put: Any, owns: dict[int, Any]) -> None:
    """Bring `own` to where the forward has brought its copy; `put` is what the copy began with."""
    if isinstance(own, MutableMapping):
        for key in [key for key in put if key not in copy]:
            own.pop(key, None)
        for key, item in list(copy.items()):
            if key not in put or item is not put[key]:
                own[key] = owns.get(id(item), item)
    elif len(copy) != len(put) or any(a is not b for a, b in zip(copy, put, strict=True)):
        own[:] = [owns.get(id(item), item) for item in copy]
