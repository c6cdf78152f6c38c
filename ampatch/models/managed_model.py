"""One model in a session: its hooks, put in and taken out exactly.

`copy.deepcopy`, `pickle`, `torch.save(model)` and sending it to another process
give plain models: no hooks, weights as they are (O3: half, else FP32), usable where
ampatch is not installed.
`copy.copy` and DataParallel's replicas share weights and hooks: they are cast
as the model is, for as long as the session is open.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting import dtype_errors
from ..casting.batched_casts import Plan
from ..casting.cast_state import CastState
from ..casting.handlers import unseen
from ..casting.kept_copies import KeptCopies
from ..casting.policy import Policy
from ..casting.special_ops import record_attention
from ..casting.stack import Block
from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import UndoAll
from ..log import logger
from ..torch_private.dtensors import exchange_data
from ..torch_private.torch_functions import is_mode_on
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
from .hooks import Hook
from .io_casting import ModelInputs
from .lent_weights import LentWeights, lent_in
from .module_overrides import ModuleOverride, Running
from .sharded_weights import (
    Place,
    ShardedWeights,
    fits,
    places_in,
    sharded_parameters,
)
from .steps import Step
from .submodule_calls import SubmoduleCalls, is_traced_by_fx


class MakesOverrides(Protocol):
    """The policies of a session, for a part of a model that is to run in another precision."""

    def module_override(
        self, module: nn.Module, precision: str, properties: Properties, state: CastState
    ) -> ModuleOverride:
        """What has a part of a model run in a precision of its own: "float" or "half"."""


_SHOWN = 5  # weights named in a warning

Places = dict[int, tuple["weakref.ref[nn.Module]", str]]
"""Where parameters stand, by their ids: in which module, under which name.

An id comes again when its parameter is gone.  A reference to the parameter itself would keep
torch from swapping it.
"""


class Owner(Protocol):
    """What a managed model needs of the session that it is in."""

    def mix(self, managed: ManagedModel) -> None:
        """FP32 values are to meet half ones in the forward: give it a policy that lets them."""

    @property
    def policies(self) -> MakesOverrides:
        """The session's."""


class ManagedModel:
    """A model under one opt level.

    `policy` is what the model's forward runs under: the session's rules at O1,
    None (no casting) at O0, O2 and O3.  `in_dtype` and `out_dtype` are what
    floating inputs and outputs are cast to, None for as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        properties: Properties,
        owner: Owner,
        *,
        state: CastState,
        policy: Policy | None,
        overrides: list[ModuleOverride],
    ) -> None:
        self.model = model
        self.properties = properties
        self.policy = policy
        self._owner = owner
        self._state = state
        self._block = Block(state)
        self.in_dtype: torch.dtype | None = None
        self.out_dtype: torch.dtype | None = None
        if properties.casts_model:
            self.in_dtype, self.out_dtype = properties.cast_model_type, torch.float32
        if properties.cast_model_outputs is not None:
            self.out_dtype = properties.cast_model_outputs
        self._inputs: ModelInputs | None = None
        self._submodule_calls: SubmoduleCalls | None = None
        if self.in_dtype is not None:
            self._inputs = self._make_inputs(type(model).__name__, self.in_dtype)
            if self.in_dtype in HALF_TYPES:
                self._submodule_calls = self._make_submodule_calls(self._inputs, self.in_dtype)
        self._step: Step | None = None
        self._overrides = overrides
        self._running = Running()
        self.sharded = ShardedWeights(model, properties)
        self._lent: LentWeights | None = None
        self.kept = KeptCopies(model)
        self.conversions: list[Converted] = []
        self._stays_float: Callable[[nn.Module], bool] = lambda module: False
        self._dtypes: dict[int, torch.dtype] = {}
        self.mixes = False  # FP32 buffers meet half tensors in its forward
        self._handles: list[Any] = []
        self.places: Places = {}  # of parameters, where calls on them are cast outside forwards
        self._copies = ModelCopies(model)
        self._plan = Plan(model) if policy is not None and policy.follows_tables else None

    def _make_inputs(self, name: str, dtype: torch.dtype) -> ModelInputs:
        return ModelInputs(name, dtype, lambda: self._owner.mix(self))

    def _make_submodule_calls(self, inputs: ModelInputs, dtype: torch.dtype) -> SubmoduleCalls:
        def is_inside(part: nn.Module) -> bool:
            lent = self._lent
            return inputs.is_taken or (lent is not None and lent.is_joined(part))

        def leave(part: nn.Module) -> None:
            if self._lent is not None:
                self._lent.end_traced() if is_dynamo_compiling() else self._lent.end(part)
            self._block.leave()

        return SubmoduleCalls(
            self.model,
            is_inside=is_inside,
            make_inputs=lambda name: self._make_inputs(name, dtype),
            push=self._enter_submodule,
            pop=leave,
            traced=lambda: None if self._lent is None else self._lent.traced,
        )

    # Put in, take out

    def convert(self, skip: Callable[[nn.Module], bool]) -> None:
        """Lend the weights in the model's dtype, or convert weights and buffers to it."""
        dtype = self.in_dtype
        if dtype is None:
            return
        self._stays_float = skip
        self.sharded.take(skip)
        shared = lent_in(self.model)
        if not self.properties.lends_weights:
            leave = shared | sharded_parameters(self.model)
            self.conversions = convert_weights(self.model, dtype, skip, leave=leave)
        if self.properties.lends_weights or (shared and dtype in HALF_TYPES):
            self._lend(dtype)
        self._dtypes = {id(entry.tensor): entry.dtype for entry in self.conversions}
        if dtype not in HALF_TYPES:
            return
        buffers = float_buffers(self.model, skip)
        self._look_at_buffers()
        lost = [name for name, buffer in buffers.items() if half_cannot_hold(buffer, dtype)]
        if lost:
            logger.warning(
                "%s: FP32 buffers stay in FP32; these hold values that %s could not: %s.",
                type(self.model).__name__,
                dtype,
                ", ".join(lost),
            )

    def _look_at_buffers(self) -> None:
        """Whether FP32 buffers meet half tensors in its forward."""
        buffers = float_buffers(self.model, self._stays_float)
        self.mixes = any(buffer.dim() for buffer in buffers.values())

    def _parts_have_changed(self) -> None:
        """The model has got other parameters or parts (a parametrization, say)."""
        mixed = self.mixes
        self._look_at_buffers()
        if self.mixes and not mixed:
            self._owner.mix(self)

    def _lend(self, dtype: torch.dtype) -> None:
        leave = functools.partial(sharded_parameters, self.model)
        self._lent = LentWeights(
            *(self.model, dtype, self._stays_float, leave, self._state, self.kept),
            at_change=self._parts_have_changed,
        )

    def give_back(self, shared: Collection[int]) -> set[int]:
        """Another model is to lend these weights (ids): they are FP32 again, and lent here too.

        Returns the ids of those that were converted.
        """
        mine = [entry for entry in self.conversions if id(entry.tensor) in shared]
        if not mine or self.in_dtype is None:
            return set()
        self.conversions = [entry for entry in self.conversions if id(entry.tensor) not in shared]
        for entry in mine:
            self._restore(entry)
            self._dtypes.pop(id(entry.tensor))
        if self._lent is None and self.in_dtype in HALF_TYPES:
            self._lend(self.in_dtype)
        return {id(entry.tensor) for entry in mine}

    def warn_of_half_weights(self) -> None:
        """O1 and O2 train FP32 parameters; those that were given in half are trained in half."""
        patches = self.properties.patch_torch_functions
        if not patches and not self.properties.lends_weights:
            return
        given = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.dtype in HALF_TYPES
        ]
        if given:
            logger.warning(
                "%s: these trainable weights were given in half and are trained in half, without "
                "FP32 master weights: %s%s. For master weights call model.float() before "
                "ampatch.initialize.",
                type(self.model).__name__,
                ", ".join(given[:_SHOWN]),
                f" and {len(given) - _SHOWN} more" if len(given) > _SHOWN else "",
            )

    def lends(self, parameter: Tensor) -> bool:
        """Whether the forward computes with half copies of this weight."""
        return self._lent is not None and self._lent.lends(parameter)

    def converted(self) -> set[int]:
        """Ids of the tensors whose dtype is, or until `uninstall` was, changed."""
        return set(self._dtypes) | self.sharded.converted()

    def overridden(self) -> set[nn.Module]:
        """The submodules that run in a precision of their own."""
        return {override.module for override in self._overrides}

    def forget_originals(self) -> None:
        """Let go of the unconverted values."""
        self.conversions = [
            entry._replace(original=entry.tensor, grad=None) for entry in self.conversions
        ]

    def install(self) -> None:
        """Hang the hooks on the model."""
        model = self.model
        if self.policy is not None and self.policy.devices is not None:
            self.policy.devices.update(param.device.type for param in model.parameters())
        record_attention(self.policy, self._state)
        self._note_places()
        handles = self._handles  # each at once: what follows may raise
        handles.append(model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
        handles.append(model.register_forward_hook(Hook(self._leave), always_call=True))
        if self._submodule_calls is not None:
            lent = self._lent
            has_halves = lent is None or not self.properties.lends_weights
            own = None if lent is None or has_halves else set(map(id, lent.whole().parameters))
            self._handles.extend(self._submodule_calls.install(own))
        for override in self._overrides:
            self._handles.extend(override.install(self._running))
        self._copies.install()

    def _note_places(self) -> None:
        if self.policy is None:
            return
        self.places.update(
            {
                id(parameter): (weakref.ref(module), name)
                for module in self.model.modules()
                for name, parameter in module.named_parameters(recurse=False)
            }
        )

    def uninstall(self) -> None:
        """Take hooks and conversions out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._submodule_calls is not None:
            self._submodule_calls.forget()
        self.kept.end()
        self._copies.uninstall()
        if self._lent is not None:
            self._lent.close()
            self._lent = None
        undo = UndoAll("ampatch: a model's weights get their dtypes back")
        undo.do(self.sharded.release)
        for entry in self.conversions:
            undo.do(self._restore, entry)
        if self.conversions:
            flatten_rnns(self.model)
        self.conversions = []
        undo.end()

    def _restore(self, entry: Converted) -> None:
        tensor, dtype, original, grad = entry
        if original.dtype is dtype:  # not yet forgotten, and exact: `open` failed half-way
            tensor.grad = None
            exchange_data(tensor, original)
            tensor.grad = grad
        else:
            set_data(tensor, tensor.detach().to(dtype))

    # Sharding

    @contextlib.contextmanager
    def being_sharded(
        self, modules: list[nn.Module], given: Any, ignored: set[int]
    ) -> Iterator[Any]:
        """`fully_shard` is called inside for parts of the model; gives the policy for it.

        `given` is the user's policy; parameters in `ignored` (ids) are not sharded.
        """
        if self.in_dtype is None:
            yield given
            self._note_places()
            return
        call = "torch.distributed.fsdp.fully_shard"
        is_whole = self.model in modules
        fits(f"{call}(mp_policy=...)", given, self.properties, is_whole)
        if given.param_dtype is torch.float32 and self.in_dtype in HALF_TYPES:
            self._keep_float(modules)
        places = places_in(modules, ignored | sharded_parameters(self.model))
        kept = self.conversions, self._dtypes
        before = self._fit_shards(places)
        try:
            yield self.sharded.policy(given, is_whole)
        except BaseException:
            self.conversions, self._dtypes = kept
            for parameter, data in before:
                set_data(parameter, data)
            raise
        self.sharded.adopt(given, self._as_given(places, kept[1]), self._stays_float)

    def _keep_float(self, modules: list[nn.Module]) -> None:
        """These parts run in FP32 from now on."""
        known, floats = self._stays_float, {part for module in modules for part in module.modules()}
        self._stays_float = lambda module: module in floats or known(module)
        for module in set(modules) - self.overridden():
            override = self._owner.policies.module_override(
                module, "float", self.properties, self._state
            )
            self._overrides.append(override)
            self._handles.extend(override.install(self._running))

    def _fit_shards(self, places: list[Place]) -> list[tuple[Tensor, Tensor]]:
        """Half parameters whose shards are to be FP32 are; returns them with the data they had."""
        before = []
        for module, _, parameter, dtype in places:
            wanted = self.sharded.storage_dtype(module, self._stays_float)
            if dtype in HALF_TYPES and dtype is not wanted:
                before.append((parameter, parameter.detach()))
                set_data(parameter, parameter.detach().to(wanted))
        gone = {id(place.parameter) for place in places}
        self.conversions = [entry for entry in self.conversions if id(entry.tensor) not in gone]
        self._dtypes = {key: dtype for key, dtype in self._dtypes.items() if key not in gone}
        return before

    def _as_given(self, places: list[Place], dtypes: dict[int, torch.dtype]) -> list[Place]:
        return [one._replace(dtype=dtypes.get(id(one.parameter), one.dtype)) for one in places]

    # Around a forward

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        is_compiled, lent, state = is_dynamo_compiling(), self._lent, self._state
        if state.modes and not is_compiled and is_mode_on():
            with unseen():
                return self._enter(model, args, kwargs)
        if lent is not None and state.thread.lent and lent.is_joined(model):
            return None
        if self._step is not None and not is_compiled and self._step.enters():
            return None
        if self._overrides and self._running.overrides:
            self._running.overrides.clear()  # Ctrl-C skips hooks
        taken = None
        if self._inputs is not None:
            taken = self._inputs.take(args, kwargs)
            if self._submodule_calls is not None and not is_compiled:
                self._submodule_calls.step_aside()
        if lent is not None and lent.has_changed and not is_compiled:
            lent.look()
        policy = self.policy
        # Nothing is entered where it would change nothing and cover nothing.
        if state.thread.stack:
            state.enter_forward(policy, self._block)
        elif policy is not state.process:
            self._block.enter(policy)
        if policy is not None and not is_compiled:
            is_kept = self.kept.is_open and lent is None
            policy.cache.open(self, self._plan, self.kept if is_kept else None)
            if policy.devices is not None:
                self._note_device(policy.devices)
        if lent is not None and not is_traced_by_fx(args, kwargs):
            lent.begin_traced(model) if is_compiled else lent.begin(model)
        return taken

    @contextlib.contextmanager
    def in_step(self, is_sent_through_call: bool) -> Iterator[None]:
        """Context manager: a framework runs code around the model; see `steps.py`.

        At levels without half weights it changes nothing.
        """
        if self._submodule_calls is None:
            yield
            return
        before = self._step
        self._step = Step(self._submodule_calls, self.out_dtype, is_sent_through_call)
        try:
            with self._step:
                yield
        finally:
            self._step = before

    def _enter_submodule(self, part: nn.Module) -> None:
        """A part is called from outside."""
        self._block.enter(self.policy)
        if self._lent is not None:
            self._lent.begin_traced(part) if is_dynamo_compiling() else self._lent.begin(part)

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        is_compiled, lent, state = is_dynamo_compiling(), self._lent, self._state
        if state.modes and not is_compiled and is_mode_on():
            with unseen():
                return self._leave(model, args, output)
        if lent is not None and lent.is_joined(model):
            return None
        if self._step is not None and not is_compiled and self._step.leaves():
            return None
        if output is None and not is_compiled:  # perhaps because the forward raised
            dtype_errors.note(sys.exc_info()[1], self._why_half())
        if lent is not None:
            lent.end_traced() if is_compiled else lent.end(model)
        if state.thread.stack:
            self._block.leave()
        if self.policy is not None and not is_compiled:
            self.policy.cache.close(self, is_whole=output is not None)
        if self._inputs is not None and not is_compiled:
            self._inputs.write_back()
            if self._submodule_calls is not None:
                self._submodule_calls.come_back()
        return None if self.out_dtype is None else cast_tensors(output, self.out_dtype)

    def _why_half(self) -> str:
        name, level = type(self.model).__name__, self.properties.opt_level
        if self.policy is not None and self.policy.follows_tables:
            return f"{name} is at {level}, whose casts make the listed calls' results half"
        return f"{name} is at {level}, with weights and inputs in {self.properties.cast_model_type}"

    def _note_device(self, devices: set[str]) -> None:
        """The model may have moved since: cast where it lives now."""
        parameter = next(self.model.parameters(), None)
        if parameter is not None:
            devices.add(parameter.device.type)

    def plain_copy(self) -> nn.Module:
        """A deep copy without hooks and patches."""
        return self._copies.plain_copy()
