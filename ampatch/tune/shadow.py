"""One call of a module, done again on a copy: in FP32 and in the half dtype, side by side.

The copy is made before the call, with its inputs and the state of the random numbers; so it
computes what the call computed, and the training goes on untouched.  The comparison itself is made
after the backward pass, when the gradients of the call's outputs are known.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampatch.device_figures import random_numbers_again
from ampatch.launch.script import describe
from ampatch.session.facade import map_tensors, tensors_within
from ampatch.sweep.execution.early_stops import lacks_memory
from ampatch.torch_private.modules import backward_tables, forward_tables

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Casting = Callable[[], contextlib.AbstractContextManager[Any]]


class RefusedInHalf(Exception):
    """A call that runs in FP32, a second time too, and not in the half dtype."""


@dataclass(frozen=True)
class HalfType:
    """How a level computes in half: with half weights and inputs, or (O1) by lists of functions."""

    dtype: torch.dtype
    autocast: Casting | None = None  # a region of torch.autocast in `dtype`; None: all in half
    scale: float = 1.0  # the loss scale

    def weights(self) -> torch.dtype:
        return torch.float32 if self.autocast is not None else self.dtype


@dataclass(frozen=True)
class Sample:
    """What half changed in one call.

    `output` and `gradient` are relative errors in the Euclidean norm, inf where half has an inf or
    NaN that FP32 has not, and None for a gradient that there is not; `overflow` and `vanish` are
    shares of all values: of those that are inf or NaN in half alone, and of those that are 0 in
    half alone.
    """

    output: float
    gradient: float | None
    overflow: float
    vanish: float

    @property
    def error(self) -> float:
        """The larger of the two errors."""
        return max(self.output, self.gradient or 0.0)


class Call:
    """A call that is about to be made, and the gradients of its outputs when they have come.

    Raises what `copy.deepcopy` raises for a module that cannot be copied.
    """

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict, as_group: bool) -> None:
        self._as_group = as_group
        self._again = random_numbers_again()
        self._copy = _copied(module)
        detached = map_tensors([args, kwargs], Tensor.detach)
        self._inputs = copy.deepcopy(detached)  # other objects too: the call may change a cache
        self._wants = [tensor.requires_grad for tensor in tensors_within([args, kwargs])]
        self._gradients: list[Tensor | None] = []

    def watch(self, output: Any) -> None:
        """Keep the gradients of what the call returned, when a backward pass brings them."""
        tensors = [tensor for tensor in tensors_within(output) if tensor.requires_grad]
        self._gradients = [None for _ in tensors]
        for n, tensor in enumerate(tensors):
            tensor.register_hook(functools.partial(self._arrived, n))

    def _arrived(self, n: int, gradient: Tensor) -> None:
        self._gradients[n] = gradient.detach().clone()

    @property
    def largest_gradient(self) -> float:
        """The largest magnitude among them; 0 if none has come."""
        there = [g for g in self._gradients if g is not None and g.numel()]
        return max((float(g.abs().max()) for g in there), default=0.0)

    def compare(self, half: HalfType) -> Sample | None:
        """What half changes; None where the module has no functions of its own.

        Raises `RefusedInHalf`, and what the module raises where it does not run a second time, or
        where memory is too short for that.
        """
        exact, calls = self._run(torch.float32, None, 1.0)
        if not calls:
            return None
        try:
            rounded = self._rounded(half)
        except Exception as error:  # half may lack a function, and modules raise what they like
            if lacks_memory(describe(error)):
                raise
            raise RefusedInHalf(str(error)) from error
        values = _Difference(exact.outputs, rounded.outputs)
        gradients = _Difference(exact.gradients, rounded.gradients)
        both = _Difference(exact.outputs + exact.gradients, rounded.outputs + rounded.gradients)
        return Sample(
            values.error,
            gradients.error if any(gradient is not None for gradient in exact.gradients) else None,
            both.overflow,
            both.vanish,
        )

    def _rounded(self, half: HalfType) -> _Outcome:
        try:
            return self._run(half.weights(), half.autocast, half.scale, self._as_group)[0]
        except RuntimeError:
            if self._as_group:
                raise
            # It reads weights of children without calling them, as MultiheadAttention does.
            return self._run(half.weights(), half.autocast, half.scale, as_group=True)[0]

    def _run(
        self, dtype: torch.dtype, autocast: Casting | None, scale: float, as_group: bool = False
    ) -> tuple[_Outcome, int]:
        """Forward and backward of a copy, and the number of functions that it called itself."""
        module = copy.deepcopy(self._copy)
        children = _Children(module, dtype)
        if as_group:
            module.to(dtype)
        else:
            children.stay_float(casts=autocast is None)
        (args, kwargs), leaves = self._leaves(dtype)
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        region = contextlib.nullcontext() if autocast is None else autocast()
        with self._again(), torch.enable_grad():
            with region, _Count(children) as count:
                output = module(*args, **kwargs)
            gradients = self._backward(tensors_within(output), [*leaves, *weights], scale)
        outputs = [tensor.detach() for tensor in tensors_within(output)]
        return _Outcome(outputs, gradients), count.calls

    def _backward(
        self, outputs: list[Tensor], wanted: list[Tensor], scale: float
    ) -> list[Tensor | None]:
        """The unscaled gradients of `wanted` for those that the call's outputs had."""
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        pairs = [(r, g) for r, g in zip(roots, self._gradients) if g is not None]
        if not (pairs and wanted):
            return []
        gradients = torch.autograd.grad(
            [root for root, _ in pairs],
            wanted,
            [(gradient * scale).to(root.dtype) for root, gradient in pairs],
            allow_unused=True,
        )
        return [None if gradient is None else gradient.double() / scale for gradient in gradients]

    def _leaves(self, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
        """The inputs in `dtype`, and those of them that want gradients."""
        wants, leaves = iter(self._wants), []

        def leaf(tensor: Tensor) -> Tensor:
            wanted, tensor = next(wants), _to(tensor, dtype)
            if not wanted:
                return tensor
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1].clone()  # the module may change it in place

        return map_tensors(copy.deepcopy(self._inputs), leaf), leaves


@dataclass(frozen=True)
class _Outcome:
    outputs: list[Tensor]
    gradients: list[Tensor | None]


class _Difference:
    """Half values beside exact ones, tensor by tensor."""

    def __init__(self, exact: list, half: list) -> None:
        norm = apart = 0.0
        count = overflow = vanish = 0
        for reference, value in zip(exact, half):
            if reference is None or value is None or not reference.is_floating_point():
                continue
            reference, value = reference.double(), value.double()
            counted = reference.isfinite()
            lost = counted & ~value.isfinite()
            overflow += int(lost.sum())
            vanish += int((counted & (reference != 0) & (value == 0)).sum())
            count += int(counted.sum())
            norm += float(reference[counted].square().sum())
            apart += float((value - reference)[counted & ~lost].square().sum())
        self.overflow, self.vanish = overflow / max(count, 1), vanish / max(count, 1)
        self.error = math.inf if overflow else math.sqrt(apart / norm) if norm else 0.0


class _Children:
    """The modules inside a copy: with `stay_float` they compute in FP32, among functions in half.

    `casts`: what they return is in `dtype`, as around them; else autocast casts where it needs to.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self.are_running = False

    def stay_float(self, casts: bool) -> None:
        for child in self._module.modules():
            if child is not self._module:
                child.forward = self._in_float(child.forward, casts)
        for name, weight in list(self._module.named_parameters(recurse=False)):
            half = nn.Parameter(_to(weight.detach(), self._dtype), weight.requires_grad)
            setattr(self._module, name, half)
        for name, buffer in list(self._module.named_buffers(recurse=False)):
            setattr(self._module, name, _to(buffer, self._dtype))

    def _in_float(self, forward: Callable, casts: bool) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.are_running:
                return forward(*args, **kwargs)
            self.are_running = True
            try:
                args, kwargs = map_tensors([args, kwargs], lambda x: _to(x, torch.float32))
                devices = (x.device.type for x in tensors_within([args, kwargs]))
                device = next(devices, "cpu")
                off = torch.autocast(device, enabled=False)
                with contextlib.nullcontext() if casts else off:
                    output = forward(*args, **kwargs)
            finally:
                self.are_running = False
            return map_tensors(output, lambda tensor: _to(tensor, self._dtype)) if casts else output

        return call


class _Count(TorchFunctionMode):
    """Counts the functions that a module calls outside the modules in it."""

    def __init__(self, children: _Children) -> None:
        super().__init__()
        self._children, self.calls = children, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = getattr(func, "__name__", "") == "__get__"
        self.calls += not (is_attribute or self._children.are_running)
        return func(*args, **(kwargs or {}))


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in _FLOATS else tensor


def _computed(module: nn.Module) -> dict[int, Any]:
    """Copies, by id, of attributes that came out of a graph, which `deepcopy` refuses.

    Such is the weight of torch's first weight norm, which a hook computes anew in each call.
    """
    every = (value for part in module.modules() for value in vars(part).values())
    return {
        id(value): value.detach().clone()
        for value in every
        if isinstance(value, Tensor) and not value.is_leaf
    }


def _copied(module: nn.Module) -> nn.Module:
    """A copy that shares nothing; of hooks only those that are torch's own (weight norm)."""
    duplicate = copy.deepcopy(module, _computed(module))
    for part in duplicate.modules():
        for table in (*(forward_tables(part) or ()), *backward_tables(part)):
            for key, hook in list(table.items()):
                if not type(hook).__module__.startswith("torch."):
                    del table[key]
    return duplicate
