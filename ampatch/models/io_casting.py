"""Casts the inputs of a half model, except values that the half dtype cannot hold.

A forward may write into its inputs.  A container without cast tensors is passed on unchanged; a
container with a cast tensor is copied.  When the forward ends, its changes of these copies and its
in-place changes of cast inputs are written into the caller's objects, in the graph if the forward
recorded one.  A tensor that is passed twice is cast once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..config.opt_levels import HALF_DTYPES
from ..log import logger
from ..torch_private.devices import has_values, is_stream_capturing
from ..torch_private.probes import is_traced_or_transformed
from .values import CASTABLE_DTYPES, caster, half_cannot_hold, is_strided, map_tensors, values_of

INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_fitting_copy = getattr(native.part, "fitting_copy", None)
"""`(tensor, dtype, limit)`: a copy of a small tensor if its values are within the limit, or None.
"""


class InputCasts:
    """The caller's inputs of one forward, and the casts and copies that the forward got instead."""

    # By the id of a tensor input: the input, its cast, and the node of the graph that cast it.
    tensors: dict[int, tuple[Tensor, Tensor, Any]]
    # A container input, its copy, and the items that the copy was made of.
    containers: list[tuple[Any, Any, Any]]

    def write_changes_back(self) -> None:
        """After the forward: write its changes of casts and copies into the caller's inputs."""
        for tensor, cast, node in self.tensors.values():
            # Inference tensors cannot be written outside of inference mode, and have no versions.
            if not (tensor.is_inference() or cast.is_inference()) and cast._version:
                _update_tensor(tensor, cast, in_graph=cast.grad_fn is not node)
        if self.containers:
            input_of = {id(cast): tensor for tensor, cast, _ in self.tensors.values()}
            input_of |= {id(copy): container for container, copy, _ in self.containers}
            for container, copy, items in self.containers:
                _update_container(container, copy, items, input_of)


class InputCaster:
    """Casts the inputs of one model to `dtype`; `name` is for the log.

    Some FP32 values do not fit the half dtype: finite values that overflow, and integers above
    those that it counts exactly.  A position is the index of a tensor among the call's inputs.  If
    an FP32 input does not fit, it and all later inputs at its position stay FP32, and
    `on_fp32_input()` is called.  CPU inputs are checked at every call.  A check on an accelerator
    synchronizes, so only the first input at a position is checked; later ones are clamped to the
    range of float16.

    Annotations stay FP32 too: a list of dicts with integers, as detectors of torchvision and
    transformers expect them.  bfloat16 moves a box at 1,000 pixels by up to 4.
    """

    def __init__(self, name: str, dtype: torch.dtype, on_fp32_input: Callable[[], None]) -> None:
        self._name = name
        self._dtype = dtype
        self._is_half = dtype in HALF_DTYPES
        self._saturates = dtype is torch.float16
        self._integer_limit = 2 / torch.finfo(dtype).eps
        self._on_fp32_input = on_fp32_input
        self._fp32_positions: set[int] = set()
        self._seen_positions: set[int] = set()

    def cast(self, args: tuple, kwargs: dict, casts: InputCasts | None) -> tuple[tuple, dict]:
        """The arguments for the forward.  `casts` records them; it is None while Dynamo traces."""
        if casts is not None:
            casts.tensors, casts.containers = {}, []
        if casts is None or is_traced_or_transformed():  # Dynamo or another tracer traces the call
            convert = self._saturated_cast if self._saturates else caster(self._dtype)
            return map_tensors(args, convert), map_tensors(kwargs, convert)
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            return (self._cast_tensor(args[0], 0, casts),), kwargs
        position = -1

        def convert_next(tensor: Any) -> Any:
            nonlocal position
            position += 1
            return self._cast_tensor(tensor, position, casts)

        def convert_value(value: Any) -> Any:
            if type(value) in (list, tuple) and _are_annotations(value):
                self._on_fp32_input()
                return value
            return map_tensors(value, convert_next, casts.containers)

        args = tuple(map(convert_value, args))
        if kwargs:
            kwargs = {name: convert_value(value) for name, value in kwargs.items()}
        return args, kwargs

    def _cast_tensor(self, tensor: Tensor, position: int, casts: InputCasts) -> Tensor:
        """In C++: `fitting_copy` of `copies.h`."""
        dtype = tensor.dtype
        if dtype is self._dtype or dtype not in CASTABLE_DTYPES:
            return tensor
        if id(tensor) in casts.tensors:
            _, earlier_cast, _ = casts.tensors[id(tensor)]
            return earlier_cast
        cast = None
        if dtype is torch.float32 and self._is_half:
            if position in self._fp32_positions:
                return tensor
            if _fitting_copy is not None and type(tensor) is Tensor:
                cast = _fitting_copy(tensor, self._dtype, self._integer_limit)
            if cast is None and not self._check_fits_half(tensor, position):
                return tensor
        if cast is None:
            # Clamp the first input too, because a recompute casts the same input again as a later
            # one.
            saturates = self._saturates and not tensor.is_cpu and is_strided(tensor)
            cast = self._saturated_cast(tensor) if saturates else tensor.to(self._dtype)
        self._seen_positions.add(position)
        casts.tensors[id(tensor)] = (tensor, cast, cast.grad_fn)
        return cast

    def _check_fits_half(self, tensor: Tensor, position: int) -> bool:
        """Whether the values fit, or are not checked.  Otherwise log, and record the position."""
        if not tensor.is_cpu and (
            position in self._seen_positions
            or not has_values(tensor.device)
            or is_stream_capturing(tensor)
        ):
            return True
        values: Any = tensor.detach() if tensor.requires_grad else tensor
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            values = values_of(tensor)
        if values is None or not values.numel():
            return True
        smallest, largest = torch.aminmax(values)
        if type(smallest) is not Tensor:  # the caller runs under FakeTensorMode or the like
            return True
        low: Any = smallest.tolist()
        high: Any = largest.tolist()
        if -self._integer_limit < low and high < self._integer_limit:
            return True
        if not half_cannot_hold(values, self._dtype):
            return True
        self._fp32_positions.add(position)
        logger.warning(
            "%s: an input of shape %s has values that %s cannot hold (from %g to %g). This input "
            "stays FP32, here and in later forwards.",
            self._name,
            "(nested)" if tensor.is_nested else tuple(tensor.shape),
            self._dtype,
            low,
            high,
        )
        self._on_fp32_input()
        return False

    def _saturated_cast(self, tensor: Any) -> Any:
        """`tensor` in float16, with finite values clamped to the range of float16."""
        if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float32:
            return caster(self._dtype)(tensor)
        largest = torch.finfo(self._dtype).max
        clamped = torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))
        return clamped.to(self._dtype)


def _are_annotations(values: Sequence) -> bool:
    """Whether these are dicts with integers: the labels of an image's boxes and masks."""
    return bool(values) and all(
        isinstance(value, Mapping)
        and any(isinstance(item, Tensor) and item.dtype in INTEGERS for item in value.values())
        for value in values
    )


def _update_tensor(tensor: Tensor, cast: Tensor, in_graph: bool) -> None:
    """Write a forward's changes of a cast into `tensor`; elements that did not change stay.

    `in_graph`: the forward's writes are part of the graph, so this write is, too.  As in an FP32
    forward, gradients of `tensor` then pass through the forward's operations.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and in_graph):
        new = cast.to(tensor.dtype)
        if is_strided(tensor):
            stays = (tensor.detach().to(cast.dtype) == cast) & tensor.isfinite()
            new = new + torch.where(stays, tensor.detach() - new.detach(), 0)
        tensor.copy_(new)


def _update_container(container: Any, copy: Any, items: Any, input_of: dict[int, Any]) -> None:
    """Change `container` as the forward has changed its copy, which was made of `items`."""
    if isinstance(container, MutableMapping):
        for key in [key for key in items if key not in copy]:
            container.pop(key, None)
        for key, item in list(copy.items()):
            if key not in items or item is not items[key]:
                container[key] = input_of.get(id(item), item)
    elif len(copy) != len(items) or any(a is not b for a, b in zip(copy, items, strict=True)):
        container[:] = [input_of.get(id(item), item) for item in copy]
