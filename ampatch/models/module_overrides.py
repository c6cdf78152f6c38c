"""Submodules that run in another precision than their model: which they are, and their casts.

If several keys of `overrides` name a module, the last key wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call, CastState, current_compute_dtype
from ..casting.handlers import without_torch_function_modes
from ..casting.policy import Policy
from ..config.opt_levels import HALF_DTYPES, Properties
from ..config.overrides import ModuleKey, matching_paths
from ..errors import AmpatchError
from ..torch_private.modules import (
    BATCH_NORMS,
    INSTANCE_NORMS,
    ORTHOGONAL_MAPS,
    TORCH_BATCH_NORMS,
    TORCH_INSTANCE_NORMS,
    has_forward,
)
from ..torch_private.probes import current_backward_pass
from ..torch_private.torch_functions import is_torch_function_mode_enabled
from .half_copy_slots import Fp32Predicate
from .own_frame import OwnFrame
from .values import cast_tensors, caster, map_tensors

_NORM_NAMES = {norm.__name__ for norm in (*TORCH_BATCH_NORMS, *TORCH_INSTANCE_NORMS)}


class ModuleOverride:
    """One submodule that runs in another precision than the rest of its model.

    Its results are cast to the precision of the override around it; without one, to `out_dtype`,
    unless that is None.  It is the `CallScope` of the submodule's frame.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        state: CastState,
        policy: Policy | None,
        out_dtype: torch.dtype | None,
    ) -> None:
        self.module = module
        self._state = state
        self._policy = policy
        self.dtype = dtype
        self._cast_in = caster(dtype)
        self._out_dtype = out_dtype
        self._last_dtype = out_dtype  # the dtype of the last forward's results
        self._frame: OwnFrame | None = None

    def install(self) -> None:
        """Give the submodule its frame."""
        self._frame = OwnFrame(self.module, self)
        self._frame.install()

    def uninstall(self) -> None:
        """Take the frame out."""
        if self._frame is not None:
            self._frame.uninstall()
            self._frame = None

    def enter(self, call: Call, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Enter a call of the submodule: cast the inputs and set the policy."""
        state = self._state
        if state.threads_in_function_modes and is_torch_function_mode_enabled():
            with without_torch_function_modes():
                return self.enter(call, module, args, kwargs)
        state.enter(call, self)
        call.compute_dtype = self.dtype
        if self._policy is not None:
            state.set_policy(call, self._policy, state.autocast_devices())
        return map_tensors(args, self._cast_in), map_tensors(kwargs, self._cast_in)

    def exit(self, call: Call) -> None:
        """Exit the call."""
        self._state.exit(call)

    def convert_output(self, output: Any) -> Any:
        """The submodule's outputs, in the dtype that the code around the call wants."""
        if (
            self._state.threads_in_function_modes
            and not is_dynamo_compiling()
            and is_torch_function_mode_enabled()
        ):
            with without_torch_function_modes():
                return self.convert_output(output)
        dtype = self._result_dtype()
        return output if dtype is None else cast_tensors(output, dtype)

    def on_error(self, error: BaseException) -> None:
        """Do nothing: the model around the submodule explains the error."""

    def run_traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Run the whole call while Dynamo traces."""
        call = Call()
        call.is_dynamo_traced = True
        try:
            self._state.enter(call, self)
            call.compute_dtype = self.dtype
            if self._policy is not None:
                self._state.set_policy(call, self._policy)
            args, kwargs = map_tensors(args, self._cast_in), map_tensors(kwargs, self._cast_in)
            output = forward(module, *args, **kwargs)
        finally:
            self._state.exit(call)
        return self.convert_output(output)

    def _result_dtype(self) -> torch.dtype | None:
        """The dtype that the code around this call wants, or None if it is not fixed."""
        outer = current_compute_dtype()
        if is_dynamo_compiling():
            return outer or self._out_dtype
        if outer is not None:
            self._last_dtype = outer
        elif current_backward_pass() == -1:  # otherwise a recompute: it repeats the last dtype
            self._last_dtype = self._out_dtype
        return self._last_dtype


def scripted_submodules(model: nn.Module) -> dict[str, nn.Module]:
    """The TorchScript modules of a model, by name, except modules inside TorchScript modules."""
    scripted: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        is_inside = bool(name) and isinstance(parent, torch.jit.ScriptModule)
        if isinstance(module, torch.jit.ScriptModule) and not is_inside:
            scripted[name] = module
    return scripted


def overridden_submodules(
    model: nn.Module, overrides: list[tuple[ModuleKey, str]]
) -> dict[nn.Module, str]:
    """The precision of each submodule that a key of `overrides` names.

    A module without a forward (a list or dict of modules) is not called, so a key that names it
    stands for each module in it.  A path may begin with the class of the model (`"Net.gate"`).
    """
    submodules = {name: module for name, module in model.named_modules() if name}
    prefix = re.compile(rf"{re.escape(type(model).__name__)}(#\d+)?\.")
    names = {key: _paths_for_key(key, prefix, submodules) for key, _ in overrides}
    precision_of: dict[nn.Module, str] = {}
    for name, module in submodules.items():
        covered_by = {name, *_containers_of(name, submodules)}
        for key, precision in overrides:
            if covered_by & names[key]:
                precision_of[module] = precision
    return precision_of


def _paths_for_key(
    key: ModuleKey, prefix: re.Pattern[str], submodules: dict[str, nn.Module]
) -> set[str]:
    if isinstance(key, str):
        match = prefix.match(key)
        return matching_paths(key, submodules) or (
            matching_paths(key[match.end() :], submodules) if match else set()
        )
    return {name for name, module in submodules.items() if isinstance(module, key)}


def _containers_of(name: str, submodules: dict[str, nn.Module]) -> Iterator[str]:
    """The modules without a forward around the submodule `name`, the innermost first."""
    while (name := name.rpartition(".")[0]) and not has_forward(submodules[name]):
        yield name


def resolve_overrides(
    model: nn.Module, overrides: list[tuple[ModuleKey, str]], properties: Properties
) -> tuple[dict[nn.Module, str], Fp32Predicate]:
    """The precision of each overridden submodule, and a predicate for modules that stay FP32.

    Raises `AmpatchError` at O2 for TorchScript modules with FP32 weights.

    In half models two kinds of modules stay FP32 without an override: InstanceNorm with running
    statistics (on half input its kernel loses updates of the statistics), and the parametrization
    `orthogonal` (its functions have no half kernels, or give inf and NaN: `matrix_exp` on the CPU).
    """
    precision_of = overridden_submodules(model, overrides)
    if properties.uses_half_copies:
        _refuse_scripted_submodules(model, properties)
    is_half = properties.cast_model_type in HALF_DTYPES
    for module in model.modules():
        is_norm = isinstance(module, INSTANCE_NORMS) and is_batch_or_instance_norm(module)
        is_kept = is_norm and properties.keeps_norms and module is not model
        if is_kept or (is_half and isinstance(module, ORTHOGONAL_MAPS)):
            precision_of.setdefault(module, "float")
    return precision_of, _make_stays_fp32(model, properties, precision_of)


def _refuse_scripted_submodules(model: nn.Module, properties: Properties) -> None:
    for name, scripted in scripted_submodules(model).items():
        if any(parameter.dtype is torch.float32 for parameter in scripted.parameters()):
            path = f"{type(model).__name__}.{name}" if name else type(model).__name__
            raise AmpatchError(
                f"{path} is TorchScript. ampatch cannot put half copies of its FP32 weights into "
                "it. Nothing was changed. "
                f"opt_level={properties.opt_level!r} needs it unscripted: compile the model with "
                "torch.compile, or trace the whole model with torch.jit.trace after initialize. "
                'opt_level="O1" works with it as it is.'
            )


def _make_stays_fp32(
    model: nn.Module, properties: Properties, precision_of: dict[nn.Module, str]
) -> Fp32Predicate:
    """A predicate for modules: whether a module computes with FP32 weights in a half model."""
    fp32_modules: set[nn.Module] = set()
    for module in model.modules():  # outer modules first
        if precision_of.get(module) == "float":
            fp32_modules.update(module.modules())
        elif precision_of.get(module) == "half":
            fp32_modules.difference_update(module.modules())
    keeps_norms, at_o2 = properties.keeps_norms, properties.uses_half_copies
    return lambda module: (
        module in fp32_modules
        or (
            keeps_norms
            and is_batch_or_instance_norm(module)
            and (at_o2 or precision_of.get(module) != "half")
        )
    )


def is_batch_or_instance_norm(module: nn.Module) -> bool:
    """Whether `keep_batchnorm_fp32` applies to this module.

    It applies to BatchNorm, SyncBatchNorm, InstanceNorm with running statistics, and scripted norms
    with running statistics.
    """
    if isinstance(module, torch.jit.ScriptModule):
        is_norm = module.original_name in _NORM_NAMES
        return is_norm and getattr(module, "running_mean", None) is not None
    if isinstance(module, INSTANCE_NORMS):
        return module.running_mean is not None
    return isinstance(module, BATCH_NORMS)


def has_fp32_buffers(model: nn.Module, stays_fp32: Fp32Predicate) -> bool:
    """Whether submodules that compute in half have FP32 buffers with at least one dimension."""
    return any(
        buffer.dtype is torch.float32 and buffer.dim()
        for module in model.modules()
        if not stays_fp32(module)
        for buffer in module.buffers(recurse=False)
    )
