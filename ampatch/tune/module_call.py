"""One call of a module, computed again on a copy, in FP32 and in the half dtype.

The module, its inputs and the state of the random generators are copied before the call.  So the
copy computes the same values, and the training does not change.  The comparison is made after the
backward pass, when the gradients of the call's outputs are known.
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

from ampatch.device_figures import replay_random_numbers
from ampatch.launch.script import describe
from ampatch.session.facade import map_tensors, tensors_within
from ampatch.sweep.execution.early_stops import lacks_memory
from ampatch.torch_private.modules import backward_hook_dicts, forward_hook_dicts

_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class RefusedInHalf(Exception):
    """A call that runs again in FP32, but not in the half dtype."""


@dataclass(frozen=True)
class HalfMode:
    """How a level computes in half: with half weights and inputs, or by autocast (O1)."""

    dtype: torch.dtype
    # Makes a torch.autocast block; None if weights and inputs are half.
    autocast: Autocast | None = None
    scale: float = 1.0  # the loss scale

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast is not None else self.dtype


@dataclass(frozen=True)
class CallErrors:
    """The errors of one call in half, against FP32.

    `output` and `gradient` are relative errors in the Euclidean norm: inf if half has an inf or NaN
    that FP32 does not have.  `gradient` is None without gradients.  `overflow` is the fraction of
    values that are inf or NaN in half only, `vanish` the fraction that are 0 in half only.
    """

    output: float
    gradient: float | None
    overflow: float
    vanish: float

    @property
    def error(self) -> float:
        """The larger one of `output` and `gradient`."""
        return max(self.output, self.gradient or 0.0)


class ModuleCall:
    """One call of a module: its inputs, recorded before it runs, and the gradients of its outputs.

    With `as_group` the submodules compute in half too; otherwise they compute in FP32.  Raises
    what `copy.deepcopy` raises for a module that cannot be copied.
    """

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict, as_group: bool) -> None:
        self._as_group = as_group
        self._with_same_random_numbers = replay_random_numbers()
        self._copy = _copy_without_hooks(module)
        detached = map_tensors([args, kwargs], Tensor.detach)
        # The copy also has objects such as a cache, which the call may change.
        self._inputs = copy.deepcopy(detached)
        self._requires_grad = [tensor.requires_grad for tensor in tensors_within([args, kwargs])]
        self._gradients: list[Tensor | None] = []

    def record_gradients(self, output: Any) -> None:
        """Store the gradients of the call's output when a backward pass computes them."""
        tensors = [tensor for tensor in tensors_within(output) if tensor.requires_grad]
        self._gradients = [None for _ in tensors]
        for n, tensor in enumerate(tensors):
            tensor.register_hook(functools.partial(self._store_gradient, n))

    def _store_gradient(self, n: int, gradient: Tensor) -> None:
        self._gradients[n] = gradient.detach().clone()

    @property
    def largest_gradient(self) -> float:
        """The largest magnitude of the gradients, or 0 if there are none."""
        gradients = [g for g in self._gradients if g is not None and g.numel()]
        return max((float(g.abs().max()) for g in gradients), default=0.0)

    def compare(self, half: HalfMode) -> CallErrors | None:
        """The errors in half, or None if the module only calls submodules.

        Raises `RefusedInHalf`, and what the module raises if it does not run again in FP32 or the
        memory is too small.
        """
        fp32, num_calls = self._run(torch.float32, None, 1.0)
        if not num_calls:
            return None
        try:
            in_half = self._run_in_half(half)
        except Exception as error:  # half may lack a function, and modules may raise anything
            if lacks_memory(describe(error)):
                raise
            raise RefusedInHalf(str(error)) from error
        values = _HalfErrors(fp32.outputs, in_half.outputs)
        gradients = _HalfErrors(fp32.gradients, in_half.gradients)
        both = _HalfErrors(fp32.outputs + fp32.gradients, in_half.outputs + in_half.gradients)
        return CallErrors(
            values.error,
            gradients.error if any(gradient is not None for gradient in fp32.gradients) else None,
            both.overflow,
            both.vanish,
        )

    def _run_in_half(self, half: HalfMode) -> _CallValues:
        try:
            return self._run(half.weight_dtype, half.autocast, half.scale, self._as_group)[0]
        except RuntimeError:
            if self._as_group:
                raise
            # The module may read weights of submodules without calling these, as MultiheadAttention
            # does.
            return self._run(half.weight_dtype, half.autocast, half.scale, as_group=True)[0]

    def _run(
        self,
        dtype: torch.dtype,
        autocast: Autocast | None,
        scale: float,
        as_group: bool = False,
    ) -> tuple[_CallValues, int]:
        """The values of a copy's forward and backward, and how many functions it called."""
        module = copy.deepcopy(self._copy)
        submodules = _Submodules(module, dtype)
        if as_group:
            module.to(dtype)
        else:
            submodules.compute_in_fp32(casts_outputs=autocast is None)
        (args, kwargs), leaves = self._leaves(dtype)
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        autocast_block = contextlib.nullcontext() if autocast is None else autocast()
        with self._with_same_random_numbers(), torch.enable_grad():
            with autocast_block, _CallCounter(submodules) as counter:
                output = module(*args, **kwargs)
            gradients = self._backward(tensors_within(output), [*leaves, *weights], scale)
        outputs = [tensor.detach() for tensor in tensors_within(output)]
        return _CallValues(outputs, gradients), counter.num_calls

    def _backward(
        self, outputs: list[Tensor], inputs: list[Tensor], scale: float
    ) -> list[Tensor | None]:
        """The unscaled gradients of `inputs`, from the recorded gradients of the outputs."""
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        pairs = [(r, g) for r, g in zip(roots, self._gradients) if g is not None]
        if not (pairs and inputs):
            return []
        gradients = torch.autograd.grad(
            [root for root, _ in pairs],
            inputs,
            [(gradient * scale).to(root.dtype) for root, gradient in pairs],
            allow_unused=True,
        )
        return [None if gradient is None else gradient.double() / scale for gradient in gradients]

    def _leaves(self, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
        """The inputs in `dtype`, and a list of the inputs that need gradients."""
        requires_grad, leaves = iter(self._requires_grad), []

        def leaf(tensor: Tensor) -> Tensor:
            needs_grad = next(requires_grad)
            tensor = _cast(tensor, dtype)
            if not needs_grad:
                return tensor
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1].clone()  # the module may change it in place

        return map_tensors(copy.deepcopy(self._inputs), leaf), leaves


@dataclass(frozen=True)
class _CallValues:
    outputs: list[Tensor]
    gradients: list[Tensor | None]


class _HalfErrors:
    """The errors of values in half against the values in FP32, over all tensors."""

    def __init__(self, fp32: list, half: list) -> None:
        norm = distance = 0.0
        count = overflow = vanish = 0
        for reference, value in zip(fp32, half):
            if reference is None or value is None or not reference.is_floating_point():
                continue
            reference, value = reference.double(), value.double()
            is_finite = reference.isfinite()
            overflowed = is_finite & ~value.isfinite()
            overflow += int(overflowed.sum())
            vanish += int((is_finite & (reference != 0) & (value == 0)).sum())
            count += int(is_finite.sum())
            norm += float(reference[is_finite].square().sum())
            distance += float((value - reference)[is_finite & ~overflowed].square().sum())
        self.overflow, self.vanish = overflow / max(count, 1), vanish / max(count, 1)
        self.error = math.inf if overflow else math.sqrt(distance / norm) if norm else 0.0


class _Submodules:
    """The submodules of a copied module; knows whether one of them is running."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self.is_any_running = False

    def compute_in_fp32(self, casts_outputs: bool) -> None:
        """Make the submodules compute in FP32, and the module itself in `dtype`.

        With `casts_outputs` outputs of submodules are cast to `dtype`; otherwise autocast does it.
        """
        for submodule in self._module.modules():
            if submodule is not self._module:
                submodule.forward = self._in_fp32(submodule.forward, casts_outputs)
        for name, weight in list(self._module.named_parameters(recurse=False)):
            cast_weight = nn.Parameter(_cast(weight.detach(), self._dtype), weight.requires_grad)
            setattr(self._module, name, cast_weight)
        for name, buffer in list(self._module.named_buffers(recurse=False)):
            setattr(self._module, name, _cast(buffer, self._dtype))

    def _in_fp32(self, forward: Callable, casts_outputs: bool) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_any_running:
                return forward(*args, **kwargs)
            self.is_any_running = True
            try:
                args, kwargs = map_tensors([args, kwargs], lambda x: _cast(x, torch.float32))
                devices = (x.device.type for x in tensors_within([args, kwargs]))
                device = next(devices, "cpu")
                off = torch.autocast(device, enabled=False)
                with contextlib.nullcontext() if casts_outputs else off:
                    output = forward(*args, **kwargs)
            finally:
                self.is_any_running = False
            if not casts_outputs:
                return output
            return map_tensors(output, lambda tensor: _cast(tensor, self._dtype))

        return call


class _CallCounter(TorchFunctionMode):
    """Counts the functions that a module calls itself, outside its submodules."""

    def __init__(self, submodules: _Submodules) -> None:
        super().__init__()
        self._submodules, self.num_calls = submodules, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = getattr(func, "__name__", "") == "__get__"
        self.num_calls += not (is_attribute or self._submodules.is_any_running)
        return func(*args, **(kwargs or {}))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in _FLOAT_DTYPES else tensor


def _non_leaf_copies(module: nn.Module) -> dict[int, Any]:
    """Detached copies, by id, of non-leaf tensors, which `deepcopy` refuses.

    An example is the weight of torch's old weight norm, which a hook computes in each call.
    """
    attributes = (value for submodule in module.modules() for value in vars(submodule).values())
    return {
        id(value): value.detach().clone()
        for value in attributes
        if isinstance(value, Tensor) and not value.is_leaf
    }


def _copy_without_hooks(module: nn.Module) -> nn.Module:
    """A deep copy of a module without its hooks, except torch's own (weight norm)."""
    duplicate = copy.deepcopy(module, _non_leaf_copies(module))
    for submodule in duplicate.modules():
        for table in (*(forward_hook_dicts(submodule) or ()), *backward_hook_dicts(submodule)):
            for key, hook in list(table.items()):
                if not type(hook).__module__.startswith("torch."):
                    del table[key]
    return duplicate
