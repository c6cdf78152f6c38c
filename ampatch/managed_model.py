"""One model in the care of a session: its hooks, put in and taken out exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .casting.policy import CastState, Policy
from .hooks import Hook, add_load_hook, add_state_dict_hook, drop_plain_hooks
from .models import (
    Converted,
    caster,
    convert_weights,
    flatten_rnns,
    map_tensors,
    set_data,
)
from .opt_levels import HALF_TYPES, Properties
from .overrides import ModuleOverride

_OWN_METHODS = ("__deepcopy__", "__reduce_ex__", "__prepare_scriptable__")


class ManagedModel:
    """A model under one opt level.

    `policy` is what the model's forward runs under: the session's rules at O1,
    None (no casting) at O0, O2 and O3.  `master_of` finds the FP32 master of a
    half parameter, up to date; `load_master` gives it a checkpoint's values.
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
        load_master: Callable[[Tensor, Tensor], None],
    ) -> None:
        self.model = model
        self.properties = properties
        self.policy = policy
        self._state = state
        self._cast_in = self._cast_out = None
        if properties.casts_model:
            self._cast_in = caster(properties.cast_model_type)
            self._cast_out = caster(torch.float32)
        if properties.cast_model_outputs is not None:
            self._cast_out = caster(properties.cast_model_outputs)
        self._overrides = overrides
        self._master_of = master_of
        self._load_master = load_master
        self._converted: list[Converted] = []
        self._dtypes: dict[int, torch.dtype] = {}
        self._handles: list[Any] = []

    # Put in, take out

    def convert(self, skip: Callable[[nn.Module], bool]) -> None:
        """Convert weights and buffers to the model's dtype."""
        self._converted = convert_weights(self.model, self.properties.cast_model_type, skip)
        self._dtypes = {id(entry.tensor): entry.dtype for entry in self._converted}

    def originals(self) -> dict[int, Tensor]:
        """FP32 values that half parameters were rounded from, by the parameter's id."""
        return {
            id(entry.tensor): entry.original
            for entry in self._converted
            if entry.dtype is torch.float32
        }

    def converted(self) -> set[int]:
        """Ids of the tensors whose dtype is, or until `uninstall` was, changed."""
        return set(self._dtypes)

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
        for override in self._overrides:
            self._handles.extend(override.install())
        dtypes = {param.dtype for param in model.parameters()}  # at O1 some may have come in half
        if (dtypes | {self.properties.cast_model_type}) & set(HALF_TYPES):
            for module in model.modules():
                self._handles.append(add_state_dict_hook(module, Hook(self._save_float)))
                self._handles.append(add_load_hook(module, Hook(self._load_masters, module)))
        vars(model)["__deepcopy__"] = self._deepcopy
        vars(model)["__reduce_ex__"] = self._reduce
        vars(model)["__prepare_scriptable__"] = self._scriptable

    def uninstall(self) -> None:
        """Take hooks and conversions out; half weights get their FP32 masters' values."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name in _OWN_METHODS:
            vars(self.model).pop(name, None)
        for tensor, dtype, original, grad in self._converted:
            master = self._master_of(tensor)
            if original.dtype is dtype:  # not yet forgotten, and exact: `open` failed half-way
                tensor.grad = None
                tensor.data = original
                tensor.grad = grad
                if master is not None:
                    master.grad = None
            elif master is None:
                set_data(tensor, tensor.data.to(dtype))
            else:
                tensor.grad = None
                tensor.data = master.data.to(dtype)
                if master.grad is not None:
                    tensor.grad, master.grad = master.grad.to(dtype), None
        if self._converted:
            flatten_rnns(self.model)
        self._converted = []

    # Around a forward

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not self._state.under_user_control():
            self._state.push(self.policy, self)
        if self.policy is not None and not torch.compiler.is_compiling():
            self.policy.cache.open(self)
            self._note_device()
        if self._cast_in is None:
            return None
        return map_tensors(args, self._cast_in), map_tensors(kwargs, self._cast_in)

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        self._state.pop(self)
        if self.policy is not None and not torch.compiler.is_compiling():
            self.policy.cache.close(self)
        return None if self._cast_out is None else map_tensors(output, self._cast_out)

    def _note_device(self) -> None:
        """The model may have moved since: cast where it lives now."""
        devices = self.policy.devices
        parameter = next(self.model.parameters(), None)
        if devices is not None and parameter is not None:
            devices.add(parameter.device.type)

    # Checkpoints and copies hold FP32

    def float_value(self, tensor: Tensor) -> Tensor:
        """What a checkpoint holds for one of the model's tensors."""
        master = self._master_of(tensor)
        if master is not None:
            return master
        if tensor.is_floating_point() and tensor.dtype in HALF_TYPES:
            return tensor.float()
        return tensor

    def _save_float(self, module: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            saved = state_dict.get(prefix + name)
            if tensor is not None and saved is not None:
                value = self.float_value(tensor)
                if value is not tensor:
                    state_dict[prefix + name] = value if saved is tensor else value.detach()

    def _load_masters(self, module: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        for name, tensor in module._parameters.items():
            loaded = state_dict.get(prefix + name)
            master = None if tensor is None else self._master_of(tensor)
            if master is not None and isinstance(loaded, Tensor) and loaded.shape == master.shape:
                self._load_master(tensor, loaded)

    def plain_copy(self, memo: dict | None = None) -> nn.Module:
        """A deep copy without hooks and patches, its weights in FP32."""
        memo, widened = {} if memo is None else memo, False
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            value = self.float_value(tensor)
            if value is not tensor and id(tensor) not in memo:
                plain, widened = value.detach().clone(), True
                if isinstance(tensor, nn.Parameter):
                    plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = plain
        own = vars(self.model)
        ours = {name: own.pop(name) for name in _OWN_METHODS if name in own}
        try:
            plain = copy.deepcopy(self.model, memo)
        finally:
            own.update(ours)
        for module in plain.modules():
            drop_plain_hooks(module)
        if widened:
            flatten_rnns(plain)
        return plain

    def _deepcopy(self, memo: dict) -> nn.Module:
        return self.plain_copy(memo)

    def _reduce(self, protocol: int) -> Any:
        return self.plain_copy().__reduce_ex__(protocol)

    def _scriptable(self) -> nn.Module:
        """What torch.jit.script compiles, hooks being nothing it could: FP32, weights shared."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return self.plain_copy({id(t): t for t in tensors if self.float_value(t) is t})
