"""Submodules of a half model, called from outside its forward: `model.encoder(x)`.

The outermost submodule that is called gets its inputs as the model's own forward would.  At O2 it
returns FP32, the dtype of the weights beside it.  A model with half weights returns half there, but
in a framework's step the dtype of the model's outputs, because a loss follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call, computes_in, thread_calls
from ..config.opt_levels import HALF_DTYPES, Properties
from ..torch_private.modules import has_forward
from .half_copy_slots import StaysFP32
from .half_copy_swaps import enclosing_swap, is_fx_traced, swappers
from .io_casting import InputCaster
from .own_frame import SubmoduleFrames
from .values import cast_tensors


class Root(Protocol):
    """What submodules ask of their model."""

    model: nn.Module
    properties: Properties

    def make_input_caster(self, submodule: str = "") -> InputCaster: ...

    def enter_with_inputs(
        self, inputs: InputCaster, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]: ...

    def run_traced_with_inputs(
        self, inputs: InputCaster, forward: Callable, module: nn.Module, args: tuple, kwargs: dict
    ) -> Any: ...

    def exit(self, call: Call) -> None: ...

    def on_error(self, error: BaseException) -> None: ...

    def step_output_dtype(self) -> torch.dtype | None: ...


class SubmoduleCalls:
    """The `Scope` of the submodules of one half model.

    Their frames are out while the model's own forward runs.
    """

    def __init__(self, root: Root, stays_fp32: StaysFP32) -> None:
        self._root = root
        self._stays_fp32 = stays_fp32
        self._uses_half_copies = root.properties.uses_half_copies
        self._inputs: dict[int, InputCaster] = {}
        self.frames = SubmoduleFrames()

    def install(self, swapped_ids: Collection[int]) -> None:
        """Give frames to submodules with half weights; at O2 to those of weights in `swapped_ids`.

        Modules that are no submodules any more lose their frames.  Inputs of submodules that stay
        FP32 are cast by their overrides alone.
        """
        modules: dict[nn.Module, str] = {}
        for name, module in self._root.model.named_modules():
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            if not (name and has_forward(module)) or is_scripted or self._stays_fp32(module):
                continue
            if any(
                id(param) in swapped_ids if self._uses_half_copies else param.dtype in HALF_DTYPES
                for param in module.parameters()
            ):
                modules[module] = name
        previous = self._inputs
        self._inputs = {
            id(module): previous.get(id(module)) or self._root.make_input_caster(name)
            for module, name in modules.items()
        }
        self.frames.set_modules(modules, self)

    def enter(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A submodule is called.  None: inside a forward, or it is a managed model or a copy."""
        inputs = self._inputs.get(id(module))
        if (
            inputs is None
            or (thread_calls.stack and enclosing_swap(module) is not None)
            or id(module) in swappers
            or is_fx_traced(args, kwargs)
        ):
            return None
        return self._root.enter_with_inputs(inputs, call, module, args, kwargs)

    def exit(self, call: Call) -> None:
        """The call has ended."""
        self._root.exit(call)

    def convert_output(self, output: Any) -> Any:
        """The submodule's outputs, in the dtype that the code around the call wants."""
        dtype = torch.float32 if self._uses_half_copies else self._root.step_output_dtype()
        if not is_dynamo_compiling():
            dtype = computes_in() or dtype
        return output if dtype is None else cast_tensors(output, dtype)

    def on_error(self, error: BaseException) -> None:
        """The model explains the error."""
        self._root.on_error(error)

    def run_traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The whole call, where Dynamo traces it."""
        inputs = self._inputs.get(id(module)) if self._uses_half_copies else None
        if (
            inputs is None
            or any(call.is_traced and call.owner is self._root for call in thread_calls.stack)
            or enclosing_swap(module) is not None
        ):
            return forward(module, *args, **kwargs)
        return self.convert_output(
            self._root.run_traced_with_inputs(inputs, forward, module, args, kwargs)
        )
