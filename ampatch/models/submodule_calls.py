"""Submodules of a half model, called from outside its forward: `model.encoder(x)`.

The inputs of the outermost submodule that is called are cast like the inputs of the model's own
forward.  At O2 the submodule returns FP32, the dtype of the weights that the script sees.  In a
model with half weights the submodule returns half, except in a framework's step: there it returns
the dtype of the model's outputs, because a loss follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call, current_compute_dtype, thread_calls
from ..config.opt_levels import HALF_DTYPES, Properties
from ..torch_private.modules import has_forward
from .half_copy_slots import Fp32Predicate
from .half_copy_swaps import enclosing_swap, is_fx_traced, swappers
from .io_casting import InputCaster
from .own_frame import SubmoduleFrames
from .values import cast_tensors


class ModelForSubmodules(Protocol):
    """The part of `ManagedModel` that `SubmoduleCalls` uses."""

    model: nn.Module
    properties: Properties

    def make_input_caster(self, submodule: str = "") -> InputCaster: ...

    def enter_with_input_caster(
        self, input_caster: InputCaster, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]: ...

    def run_traced_with_input_caster(
        self,
        input_caster: InputCaster,
        forward: Callable,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
    ) -> Any: ...

    def exit(self, call: Call) -> None: ...

    def on_error(self, error: BaseException) -> None: ...

    def step_output_dtype(self) -> torch.dtype | None: ...


class SubmoduleCalls:
    """The `CallScope` of the submodules of one half model.

    Their frames are suspended while the model's own forward runs.
    """

    def __init__(self, managed: ModelForSubmodules, stays_fp32: Fp32Predicate) -> None:
        self._managed = managed
        self._stays_fp32 = stays_fp32
        self._uses_half_copies = managed.properties.uses_half_copies
        self._input_casters: dict[int, InputCaster] = {}
        self.frames = SubmoduleFrames()

    def update_frames(self, swapped_ids: Collection[int]) -> None:
        """Give frames to the submodules that compute in half, and remove all other frames.

        At O2 such a submodule has a weight in `swapped_ids`, the ids of the weights that get half
        copies; at O3 it has half weights.  Scripted submodules get no frame.
        """
        modules: dict[nn.Module, str] = {}
        for name, module in self._managed.model.named_modules():
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            if not (name and has_forward(module)) or is_scripted or self._stays_fp32(module):
                continue
            if any(
                id(param) in swapped_ids if self._uses_half_copies else param.dtype in HALF_DTYPES
                for param in module.parameters()
            ):
                modules[module] = name
        previous = self._input_casters
        self._input_casters = {
            id(module): previous.get(id(module)) or self._managed.make_input_caster(name)
            for module, name in modules.items()
        }
        self.frames.set_modules(modules, self)

    def enter(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Enter a call from outside the model's forward.

        Returns None if a forward that contains the module is running, or if the module is itself a
        managed model, is a copy, or is traced by torch.fx.
        """
        input_caster = self._input_casters.get(id(module))
        if (
            input_caster is None
            or (thread_calls.stack and enclosing_swap(module) is not None)
            or id(module) in swappers
            or is_fx_traced(args, kwargs)
        ):
            return None
        return self._managed.enter_with_input_caster(input_caster, call, module, args, kwargs)

    def exit(self, call: Call) -> None:
        """Exit the call as the model does."""
        self._managed.exit(call)

    def convert_output(self, output: Any) -> Any:
        """The submodule's outputs, in the dtype that the code around the call wants."""
        dtype = torch.float32 if self._uses_half_copies else self._managed.step_output_dtype()
        if not is_dynamo_compiling():
            dtype = current_compute_dtype() or dtype
        return output if dtype is None else cast_tensors(output, dtype)

    def on_error(self, error: BaseException) -> None:
        """Explain the error as the model does."""
        self._managed.on_error(error)

    def run_traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Run the whole call while Dynamo traces."""
        input_caster = self._input_casters.get(id(module)) if self._uses_half_copies else None
        if (
            input_caster is None
            or any(
                call.is_dynamo_traced and call.owner is self._managed for call in thread_calls.stack
            )
            or enclosing_swap(module) is not None
        ):
            return forward(module, *args, **kwargs)
        return self.convert_output(
            self._managed.run_traced_with_input_caster(input_caster, forward, module, args, kwargs)
        )
