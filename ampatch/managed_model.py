"""One model in the care of a session: its hooks, put in and taken out exactly.

`copy.deepcopy`, `pickle`, `torch.save(model)` and sending it to another process
give plain models: no hooks, FP32 weights (O0, O1: the same values; O2: the
masters'; O3: the rounded ones, widened), usable where ampatch is not installed.
`copy.copy` and DataParallel's replicas share weights and hooks: they are cast
as the model is, for as long as the session is open.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .casting import dtype_errors
from .casting.batched_casts import Plan
from .casting.handlers import is_mode_on, unseen
from .casting.policy import CastState, Policy
from .errors import TakingOut
from .half_grads import undress
from .hooks import Hook, add_load_hook, add_state_dict_hook, drop_plain_hooks
from .models import (
    Converted,
    cast_tensors,
    convert_weights,
    flatten_rnns,
    set_data,
)
from .opt_levels import HALF_TYPES, Properties
from .overrides import ModuleOverride

_OWN_METHODS = ("__deepcopy__", "__reduce_ex__", "__prepare_scriptable__")


class ManagedModel:
    """A model under one opt level.

    `policy` is what the model's forward runs under: the session's rules at O1,
    None (no casting) at O0, O2 and O3.  `in_dtype` and `out_dtype` are what
    floating inputs and outputs are cast to, None for as they are.  `master_of` finds the FP32 master of a
    half parameter, up to date, `show_master_of` for who may write into it; `load_master` gives it a checkpoint's values.  `before_forward`
    is told of each forward of a model whose weights may have masters.
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
        show_master_of: Callable[[Tensor], Tensor | None],
        load_master: Callable[[Tensor, Tensor], None],
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
        self._overrides = overrides
        self._master_of = master_of
        self._show_master_of = show_master_of
        self._load_master = load_master
        self._before_forward = before_forward
        self._may_have_masters = False
        self._converted: list[Converted] = []
        self._dtypes: dict[int, torch.dtype] = {}
        self._handles: list[Any] = []
        self._plan = Plan(model) if policy is not None and policy.follows_tables else None

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
        for override in self._overrides:
            self._handles.extend(override.install())
        dtypes = {param.dtype for param in model.parameters()}  # at O1 some may have come in half
        if (dtypes | {self.properties.cast_model_type}) & set(HALF_TYPES):
            self._may_have_masters = self.properties.master_weights is not False
            for module in _hookable(model):
                self._handles.append(add_state_dict_hook(module, self._save_float))
                self._handles.append(add_load_hook(module, self._load_masters))
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
            set_data(tensor, tensor.data.to(dtype))
        else:
            tensor.grad = None
            tensor.data = master.data.to(dtype)
            if master.grad is not None:
                tensor.grad, master.grad = master.grad.to(dtype), None

    # Around a forward

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        state, policy, dtype = self._state, self.policy, self.in_dtype
        if state.modes and not is_dynamo_compiling() and is_mode_on():
            with unseen():
                return self._enter(model, args, kwargs)
        # Where it would change nothing and cover nothing, no push: `pop` finds none of ours then.
        if (state.thread.frames or policy is not state.process) and not state.under_user_control():
            state.push(policy, self)
        if policy is not None and not is_dynamo_compiling():
            policy.cache.open(self, self._plan)
            if policy.devices is not None:
                self._note_device()
        if self._may_have_masters and not is_dynamo_compiling():
            self._before_forward(model)
        if dtype is None:
            return None
        if len(args) == 1:
            args = (cast_tensors(args[0], dtype),)
        else:
            args = cast_tensors(args, dtype)
        return args, (cast_tensors(kwargs, dtype) if kwargs else kwargs)

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
        """What a checkpoint holds for one of the model's tensors."""
        master = self._master_of(tensor)
        if master is not None:
            return master
        if tensor.is_floating_point() and tensor.dtype in HALF_TYPES:
            return tensor.float()
        return tensor

    def _save_float(self, module: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
        for name, tensor in _own_tensors(module):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                master = self._show_master_of(tensor)
                value = self.float_value(tensor) if master is None else master
                if value is not tensor:
                    state_dict[prefix + name] = value if saved is tensor else value.detach()

    def _load_masters(self, module: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        for name, tensor in _own_tensors(module):
            loaded = state_dict.get(prefix + name)
            master = self._master_of(tensor)
            if master is not None and isinstance(loaded, Tensor) and loaded.shape == master.shape:
                self._load_master(tensor, loaded)

    def plain_copy(self, memo: dict | None = None) -> nn.Module:
        """A deep copy without hooks and patches, its weights in FP32."""
        memo, widened = {} if memo is None else memo, False
        for tensor, value in self._float_values():
            if value is not tensor and id(tensor) not in memo:
                memo[id(tensor)], widened = _like(tensor, value.detach().clone()), True
        plain = self._copy(memo)
        if widened:
            flatten_rnns(plain)
        return plain

    def plain_view(self) -> nn.Module:
        """As `plain_copy`, on the same memory where there are FP32 values to share."""
        return self._copy(
            {
                id(tensor): tensor if value is tensor else _like(tensor, value.detach())
                for tensor, value in self._float_values()
            }
        )

    def _float_values(self) -> Iterator[tuple[Tensor, Tensor]]:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            yield tensor, self.float_value(tensor)

    def _copy(self, memo: dict) -> nn.Module:
        own = vars(self.model)
        ours = {name: own.pop(name) for name in _OWN_METHODS if name in own}
        try:
            plain = copy.deepcopy(self.model, memo)
        finally:
            own.update(ours)
        for module in plain.modules():
            drop_plain_hooks(module)
        return plain

    def _deepcopy(self, memo: dict) -> nn.Module:
        return self.plain_copy(memo)

    def _reduce(self, protocol: int) -> Any:
        """Pickle takes a plain copy; `copy.copy`, which asks here too, shares weights and hooks."""
        model = self.model
        make, args, state, *rest = type(model).__reduce_ex__(model, protocol)
        if rest and any(rest) or not isinstance(state, dict):  # a class that pickles in its own way
            return _kept(self.plain_view()).__reduce_ex__(protocol)
        shared = {name: value for name, value in state.items() if name not in _OWN_METHODS}
        return make, args, _SharedState(shared, self.plain_view)

    def _scriptable(self) -> nn.Module:
        """What torch.jit.script compiles, hooks being nothing it could: FP32, weights shared."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return self.plain_copy({id(t): t for t in tensors if self.float_value(t) is t})


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


def _kept(plain: nn.Module) -> nn.Module:
    """`plain`; on its way to a spawned process its tensors live until that has opened them."""
    process = get_spawning_popen()
    if process is not None:
        vars(process).setdefault("_ampatch_sent", []).append(plain)
    return plain


class _SharedState(dict):
    """A model's attributes as they are; pickled, those of its plain copy."""

    def __init__(self, shared: dict, plain_view: Callable[[], nn.Module]) -> None:
        super().__init__(shared)
        self._plain_view = plain_view

    def __reduce_ex__(self, protocol: int) -> tuple:
        plain = _kept(self._plain_view())
        return dict, (type(plain).__reduce_ex__(plain, protocol)[2],)


def _hookable(model: nn.Module) -> Iterator[nn.Module]:
    """Every module but TorchScript ones, which take no state_dict hooks; the model itself."""
    for module in model.modules():
        if module is model or not isinstance(module, torch.jit.ScriptModule):
            yield module


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of what a module's hooks answer for: its own, its TorchScript children's."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            yield from child.named_parameters(name, remove_duplicate=False)
            yield from child.named_buffers(name, remove_duplicate=False)
