"""Submodules of a half model, called from outside its forward: `model.encoder(x)`.

The outermost submodule that is called gets its inputs as the model's own forward would.  Where half
copies stand in for weights it returns FP32, as the weights are that a method reads.  A model with
half weights returns half there; but in a framework's step the dtype of the model's results, because
a loss follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call, CastState, computes_in, here
from ..config.opt_levels import HALF_TYPES, Properties
from ..torch_private.modules import has_forward
from .io_casting import ModelInputs
from .lent_places import StaysFloat
from .lent_weights import LentWeights, is_traced_by_fx, lenders, lending_around
from .own_frame import FramesOfSubmodules
from .values import cast_tensors


class Whole(Protocol):
    """What submodules ask of their model."""

    model: nn.Module
    properties: Properties
    lent: LentWeights | None

    def inputs_of(self, submodule: str = "") -> ModelInputs: ...

    def begin_with(
        self, inputs: ModelInputs, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]: ...

    def traced_with(
        self, inputs: ModelInputs, forward: Callable, module: nn.Module, args: tuple, kwargs: dict
    ) -> Any: ...

    def end(self, call: Call) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def results_in_step(self) -> torch.dtype | None: ...


class SubmoduleCalls:
    """The `Scope` of the submodules of one half model.

    Their frames are out while the model's own forward runs.
    """

    def __init__(self, whole: Whole, state: CastState) -> None:
        self._whole = whole
        self.lends = whole.properties.uses_half_copies
        self._inputs: dict[int, ModelInputs] = {}
        self.frames = FramesOfSubmodules()

    def install(self, lent: Collection[int] | None, stays_float: StaysFloat) -> None:
        """Give frames to the submodules with half weights, or with those in `lent` (ids).

        Those that are no submodules any more lose theirs.  Inputs of submodules that stay FP32 are
        cast by their overrides alone.
        """
        inputs: dict[int, ModelInputs] = {}
        for name, module in self._whole.model.named_modules():
            if not (name and has_forward(module)) or stays_float(module):
                continue
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if any(
                parameter.dtype in HALF_TYPES if lent is None else id(parameter) in lent
                for parameter in module.parameters()
            ):
                known = self._inputs.get(id(module))
                inputs[id(module)] = known or self._whole.inputs_of(name)
                if known is None:
                    self.frames.put(module, self)
        self._inputs = inputs
        self.frames.keep(inputs)

    def begin(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A submodule is called.  None: within a forward, or it is a model by itself, or a copy."""
        inputs = self._inputs.get(id(module))
        if (
            inputs is None
            or (here.stack and lending_around(module) is not None)
            or id(module) in lenders
            or is_traced_by_fx(args, kwargs)
        ):
            return None
        return self._whole.begin_with(inputs, call, module, args, kwargs)

    def end(self, call: Call) -> None:
        """The call has ended."""
        self._whole.end(call)

    def results(self, output: Any) -> Any:
        """Outside of forwards weights that half copies stand in for are FP32, beside the output."""
        to = torch.float32 if self.lends else self._whole.results_in_step()
        if not is_dynamo_compiling():
            to = computes_in() or to
        return output if to is None else cast_tensors(output, to)

    def failed(self, error: BaseException) -> None:
        """The model explains it."""
        self._whole.failed(error)

    def traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The whole call."""
        inputs = self._inputs.get(id(module)) if self.lends else None
        if (
            inputs is None
            or any(call.is_traced and call.owner is self._whole for call in here.stack)
            or lending_around(module) is not None
        ):
            return forward(module, *args, **kwargs)
        return self.results(self._whole.traced_with(inputs, forward, module, args, kwargs))
