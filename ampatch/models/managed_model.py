"""One model in the care of a session: its hooks, put in and taken out exactly.

`copy.deepcopy`, `pickle`, `torch.save(model)` and sending it to another process
give plain models: no hooks, FP32 weights (O0, O1: the same values; O2: the
masters'; O3: the rounded ones, widened), usable where ampatch is not installed.
`copy.copy` and DataParallel's replicas share weights and hooks: they are cast
as the model is, for as long as the session is open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting import dtype_errors
from ..casting.batched_casts import Plan
from ..casting.handlers import is_mode_on, unseen
from ..casting.policy import CastState, Policy
from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import TakingOut
from ..log import logger
from ..torch_private.half_grads import undress
from .conversion import (
    Converted,
    cast_tensors,
    convert_weights,
    flatten_rnns,
    float_buffers,
    half_cannot_hold,
    set_data,
)
from .copies import ModelCopies
from .float_copies import WidenedCopies
from .hooks import Hook
from .io_casting import ModelInputs
from .module_overrides import ModuleOverride
from .plain_parameters import PlainParameters
from .state_dicts import Checkpoints
from .submodule_calls import Parts


class ManagedModel:
    """A model under one opt level.

    `policy` is what the model's forward runs under: the session's rules at O1,
    None (no casting) at O0, O2 and O3.  `in_dtype` and `out_dtype` are what
    floating inputs and outputs are cast to, None for as they are.  `master_of` finds the FP32 master of a
    half parameter, up to date, `show_master_of` for who may write into it; `load_master` gives it
    a checkpoint's values.  `before_forward` is told of each forward of a model whose weights may
    have masters.  `mix(self)` is called when FP32 values are to meet half ones in the forward,
    for a `policy` that lets them.
    """

    def __init__(
        self,
        model: nn.Module,
        properties: Properties,
        *,
        state: CastState,
        policy: Policy | None,
        overrides: list[ModuleOverride],
        master_of: Callable[[Tensor], Tensor | None],
        show_master_of: Callable[[Tensor, bool], Tensor | None],
        load_master: Callable[[Tensor, Tensor], None],
        stand_ins: PlainParameters,
        widened: WidenedCopies,
        mix: Callable[[ManagedModel], None],
        before_forward: Callable[[nn.Module], None],
    ) -> None:
        self.model = model
        self.properties = properties
        self.policy = policy
        self._state = state
        self.in_dtype = self.out_dtype = None
        if properties.casts_model:
            self.in_dtype, self.out_dtype = properties.cast_model_type, torch.float32
        if properties.cast_model_outputs is not None:
            self.out_dtype = properties.cast_model_outputs
        self._inputs = None
        if self.in_dtype is not None:
            name = type(model).__name__
            self._inputs = ModelInputs(name, self.in_dtype, lambda: mix(self))
        self._parts = self._make_parts(mix) if self.in_dtype in HALF_TYPES else None
        self._overrides = overrides
        self._master_of = master_of
        self._show_master_of = show_master_of
        self._load_master = load_master
        self._widened = widened
        self._before_forward = before_forward
        self._may_have_masters = False
        self._converted: list[Converted] = []
        self._dtypes: dict[int, torch.dtype] = {}
        self.mixes = False  # FP32 buffers meet half tensors in its forward
        self._handles: list[Any] = []
        self._copies = ModelCopies(model, self.float_value, stand_ins)
        self._plan = Plan(model) if policy is not None and policy.follows_tables else None

    def _make_parts(self, mix: Callable[[ManagedModel], None]) -> Parts:
        return Parts(
            self.model,
            is_inside=lambda: self._inputs.is_taken,
            make_inputs=lambda name: ModelInputs(name, self.in_dtype, lambda: mix(self)),
            push=self._enter_part,
            pop=self._state.pop,
        )

    # Put in, take out

    def convert(self, skip: Callable[[nn.Module], bool]) -> None:
        """Convert weights and buffers to the model's dtype."""
        dtype = self.properties.cast_model_type
        self._converted = convert_weights(self.model, dtype, skip)
        self._dtypes = {id(entry.tensor): entry.dtype for entry in self._converted}
        if dtype not in HALF_TYPES:
            return
        for tensor, _, original, _ in self._converted:
            if tensor.dtype in HALF_TYPES and not isinstance(tensor, nn.Parameter):
                self._widened.keep_original(tensor, original.float())
        buffers = float_buffers(self.model, skip)
        self.mixes = any(buffer.dim() for buffer in buffers.values())
        lost = [name for name, buffer in buffers.items() if half_cannot_hold(buffer, dtype)]
        if lost:
            logger.warning(
                "%s: FP32 buffers stay in FP32; these hold values that %s could not: %s.",
                type(self.model).__name__,
                dtype,
                ", ".join(lost),
            )

    def originals(self) -> dict[int, Tensor]:
        """FP32 values that half parameters were rounded from, by the parameter's id.

        A parameter that came in the other half type was rounded too.
        """
        return {
            id(entry.tensor): entry.original.float()
            for entry in self._converted
            if entry.tensor.dtype in HALF_TYPES
        }

    def converted(self) -> set[int]:
        """Ids of the tensors whose dtype is, or until `uninstall` was, changed."""
        return set(self._dtypes)

    def overridden(self) -> set[nn.Module]:
        """The submodules that run in a precision of their own."""
        return {override.module for override in self._overrides}

    def forget_originals(self) -> None:
        """Let go of the unconverted values; masters hold those that are still needed."""
        self._converted = [
            entry._replace(original=entry.tensor, grad=None) for entry in self._converted
        ]

    def install(self) -> None:
        """Hang the hooks on the model."""
        model = self.model
        if self.policy is not None and self.policy.devices is not None:
            self.policy.devices.update(param.device.type for param in model.parameters())
        self._handles = [
            model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True),
            model.register_forward_hook(Hook(self._leave), always_call=True),
        ]
        if self._parts is not None:
            self._handles.extend(self._parts.install())
        for override in self._overrides:
            self._handles.extend(override.install())
        dtypes = {param.dtype for param in model.parameters()}  # at O1 some may have come in half
        if (dtypes | {self.properties.cast_model_type}) & set(HALF_TYPES):
            self._may_have_masters = self.properties.master_weights is not False
            checkpoints = Checkpoints(model, self._saved_value, self._load_float)
            self._handles.extend(checkpoints.install())
        self._copies.install()

    def uninstall(self) -> None:
        """Take hooks and conversions out; half weights get their FP32 masters' values."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._parts is not None:
            self._parts.forget()
        self._copies.uninstall()
        taking_out = TakingOut("ampatch: a model's weights get their FP32 values")
        for entry in self._converted:
            taking_out.do(self._give_back, entry)
        if self._converted:
            flatten_rnns(self.model)
        self._converted = []
        taking_out.end()

    def _give_back(self, entry: Converted) -> None:
        tensor, dtype, original, grad = entry
        master = self._master_of(tensor)
        undress(tensor)
        if original.dtype is dtype:  # not yet forgotten, and exact: `open` failed half-way
            tensor.grad = None
            tensor.data = original
            tensor.grad = grad
            if master is not None:
                master.grad = None
        elif master is None:
            set_data(tensor, self._last_value(tensor).to(dtype))
        else:
            tensor.grad = None
            tensor.data = master.data.to(dtype)
            if master.grad is not None:
                tensor.grad, master.grad = master.grad.to(dtype), None

    def _last_value(self, tensor: Tensor) -> Tensor:
        return self._widened.release(tensor) if tensor.dtype in HALF_TYPES else tensor.data

    # Around a forward

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._state.modes and not is_dynamo_compiling() and is_mode_on():
            with unseen():
                return self._enter(model, args, kwargs)
        taken = None
        if self._inputs is not None:
            taken = self._inputs.take(args, kwargs)
            if self._parts is not None and not is_dynamo_compiling():
                self._parts.step_aside()
        state, policy = self._state, self.policy
        # Where it would change nothing and cover nothing, no push: `pop` finds none of ours then.
        if (state.thread.frames or policy is not state.process) and not state.under_user_control():
            state.push(policy, self)
        if policy is not None and not is_dynamo_compiling():
            policy.cache.open(self, self._plan)
            if policy.devices is not None:
                self._note_device()
        if not is_dynamo_compiling():
            if self._may_have_masters:
                self._before_forward(model)
            if self._widened.copies:
                self._widened.take_over()
        return taken

    def _enter_part(self, owner: Any) -> None:
        """A part is called from outside."""
        self._state.push(self.policy, owner)
        if self._may_have_masters:
            self._before_forward(self.model)
        if self._widened.copies:
            self._widened.take_over()

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        if self._state.modes and not is_dynamo_compiling() and is_mode_on():
            with unseen():
                return self._leave(model, args, output)
        if output is None and not is_dynamo_compiling():  # perhaps because the forward raised
            dtype_errors.note(sys.exc_info()[1], self._why_half())
        if self._state.thread.frames:
            self._state.pop(self)
        if self.policy is not None and not is_dynamo_compiling():
            self.policy.cache.close(self, is_whole=output is not None)
        if self._inputs is not None and not is_dynamo_compiling():
            self._inputs.give_back()
            if self._parts is not None:
                self._parts.come_back()
        return None if self.out_dtype is None else cast_tensors(output, self.out_dtype)

    def _why_half(self) -> str:
        name, level = type(self.model).__name__, self.properties.opt_level
        if self.policy is not None and self.policy.follows_tables:
            return f"{name} is at {level}, whose casts make the listed calls' results half"
        return f"{name} is at {level}, with weights and inputs in {self.properties.cast_model_type}"

    def _note_device(self) -> None:
        """The model may have moved since: cast where it lives now."""
        parameter = next(self.model.parameters(), None)
        if parameter is not None:
            self.policy.devices.add(parameter.device.type)

    # Checkpoints and copies hold FP32

    def float_value(self, tensor: Tensor) -> Tensor:
        """The FP32 values of one of the model's tensors: its master, itself, or a widened copy."""
        master = self._master_of(tensor)
        if master is not None:
            return master
        return self._widened.value(tensor) if tensor.dtype in HALF_TYPES else tensor

    def _saved_value(self, tensor: Tensor, keep_vars: bool) -> Tensor:
        """What a checkpoint holds for one of the model's tensors; writes into it count."""
        master = self._show_master_of(tensor, keep_vars)
        if master is not None:
            return master
        return self._widened.give(tensor) if tensor.dtype in HALF_TYPES else tensor

    def _load_float(self, tensor: Tensor, values: Tensor) -> None:
        if self._master_of(tensor) is not None:
            self._load_master(tensor, values)
        else:
            self._widened.load(tensor, values)

    def plain_copy(self) -> nn.Module:
        """A deep copy without hooks and patches, its weights in FP32."""
        return self._copies.plain_copy()
