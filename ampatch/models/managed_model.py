"""One model in a session: its hooks, put in and taken out exactly.

`copy.deepcopy`, `pickle`, `torch.save(model)` and sending it to another process
give plain models: no hooks, weights as they are (O3: half, else FP32), usable where
ampatch is not installed.
`copy.copy` and DataParallel's replicas share weights and hooks: they are cast
as the model is, for as long as the session is open.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting import dtype_errors
from ..casting.batched_casts import LastForward
from ..casting.calls import (
    KEEP,
    USER,
    Call,
    computes_in,
    here,
)
from ..casting.cast_state import CastState
from ..casting.handlers import unseen
from ..casting.held_functions import HeldFunctions
from ..casting.policy import Policy
from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import UndoAll
from ..log import logger
from ..torch_private.torch_functions import is_mode_on
from .conversion import ConvertedWeights
from .copies import ModelCopies
from .hooks import Hook
from .io_casting import Given, ModelInputs
from .lent_places import StaysFloat
from .lent_weights import Lending, LentWeights, lending_around, lent_types
from .module_overrides import ModuleOverride, has_float_buffers
from .running_statistics import RunningStatistics, norms_of
from .sharded_weights import checked_shards, sharded_parameters
from .submodule_calls import SubmoduleCalls, forward_of, is_traced_by_fx
from .values import cast_tensors

_SHOWN = 5  # weights named in a warning

Places = dict[int, tuple["weakref.ref[nn.Module]", str]]
"""Where parameters stand, by their ids: in which module, under which name.

An id comes again when its parameter is gone.  A reference to the parameter itself would keep
torch from swapping it.
"""


class OwnSession(Protocol):
    """What a managed model needs of the session that it is in."""

    def mix(self, managed: ManagedModel) -> None:
        """FP32 meets half in the forward: give the model a policy that casts such calls."""


class FrameworkStep(Protocol):
    """One step of a framework, which may be a call of the model that is no forward."""

    def enters(self) -> bool:
        """The model is called.  Returns whether this call is the step."""

    def leaves(self) -> bool:
        """A call of the model ends.  Returns whether it was the step."""


class ManagedModel:
    """A model under one opt level.

    `policy` is what the model's forward runs under: the session's rules at O1,
    None (no casting) at O0, and at O2 and O3, where `CastState.in_half_models` stands
    for None.  `in_dtype` and `out_dtype` are the dtypes that floating inputs and
    outputs are cast to; None: they are left as they are.
    `answers_forward`: at a level with half weights `model.forward(...)` is a call of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        properties: Properties,
        session: OwnSession,
        *,
        state: CastState,
        policy: Policy | None,
        overrides: list[ModuleOverride],
        answers_forward: bool = False,
    ) -> None:
        self.model = model
        self.properties = properties
        self.policy = policy
        self._session = session
        self._state = state
        self.in_dtype: torch.dtype | None = None
        self.out_dtype: torch.dtype | None = None
        if properties.casts_model:
            self.in_dtype, self.out_dtype = properties.cast_model_type, torch.float32
        if properties.cast_model_outputs is not None:
            self.out_dtype = properties.cast_model_outputs
        self._inputs: ModelInputs | None = None
        self._parts: SubmoduleCalls | None = None
        self._step: FrameworkStep | None = None
        self._overrides = overrides
        self.conversions = ConvertedWeights()
        self.lent: LentWeights | None = None
        self._stays_float: StaysFloat = lambda module: False
        self._mixes = False  # FP32 buffers meet half tensors in its forward
        self._handles: list[Any] = []
        self.places: Places = {}  # parameters whose calls are cast outside forwards
        self._first: Places = {}  # the parameters and buffers that it came with
        self.held = HeldFunctions(model)
        self._copies: ModelCopies | None = None
        self.statistics: RunningStatistics | None = None
        self._answers_forward = answers_forward
        self._has_warned_of_block = False
        self._last_forward: LastForward | None = None
        if policy is not None:
            self._last_forward = LastForward(model, policy.half_to)

    # Put in, take out

    def convert(self, stays_float: StaysFloat) -> None:
        """Lend the weights in the model's dtype, or convert weights and buffers to it."""
        dtype = self.in_dtype
        if dtype is None:
            return
        self._stays_float = stays_float
        if not self.properties.lends_weights:
            leave = sharded_parameters(self.model).union(lent_types(self.model))
            self.conversions.convert(self.model, dtype, stays_float, leave)
        if dtype in HALF_TYPES:
            self.lent = LentWeights(self.model, dtype, stays_float, self._look_at_buffers)
            self.lent.open()

    def check_shards(self) -> None:
        """Raise `AmpatchError` where the precision of FSDP2 contradicts the level."""
        if checked_shards(self.model, self.properties, self._stays_float):
            # `fully_shard` has replaced converted parameters.
            tensors = (*self.model.parameters(), *self.model.buffers())
            self.conversions.forget(set(self.conversions.entries) - set(map(id, tensors)))

    def _look_at_buffers(self) -> None:
        """FP32 buffers stay FP32.  Those with a dimension meet half tensors in the forward."""
        mixed, self._mixes = self._mixes, has_float_buffers(self.model, self._stays_float)
        if self._mixes and not mixed:
            self._session.mix(self)

    def give_back(self, shared: Collection[int]) -> set[int]:
        """Another model is to lend these weights (ids): they are FP32 again, and lent here too.

        Returns the ids of those that were converted.
        """
        mine = set(self.conversions.entries) & set(shared)
        if mine:
            self.conversions.restore(mine)
            if self.lent is not None:
                self.lent.open()
        return mine

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
        return self.lent is not None and id(parameter) in self.lent.ids()

    def note_request(self, wanted: Collection[int]) -> bool:
        """Gradients of these weights (ids) are asked for: see `LastForward.note_request`."""
        last, lent = self._last_forward, self.lent
        may_share = last is not None and last.note_request(wanted)
        return (lent is not None and lent.note_request(wanted)) or may_share

    def converted(self) -> set[int]:
        """Ids of the tensors whose dtype is changed."""
        return set(self.conversions.entries)

    def overridden(self) -> set[nn.Module]:
        """The submodules that run in a precision of their own."""
        return {override.module for override in self._overrides}

    def forget_originals(self) -> None:
        """Let go of the unconverted values."""
        self.conversions.forget_originals()

    def install(self) -> None:
        """Hang the hooks on the model."""
        model = self.model
        if self.policy is not None and self.policy.devices is not None:
            self.policy.devices.update(param.device.type for param in model.parameters())
        self._note_places()
        if self.in_dtype is not None:
            self._inputs = self.inputs_of()
        handles = self._handles  # each at once: what follows may raise
        handles.append(model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
        handles.append(model.register_forward_hook(Hook(self._leave), always_call=True))
        if self.lent is not None:
            self._parts = SubmoduleCalls(self, self._state)
            lent = self.lent.ids() if self._parts.lends else None
            handles += self._parts.install(lent, self._stays_float)
        for override in self._overrides:
            self._handles.extend(override.install())
        answers = self._answers_forward and self.lent is not None
        self._copies = ModelCopies(model)
        self._copies.install(forward_of(model, self._enter, self._leave) if answers else None)
        if self.properties.loss_scale == "dynamic" and (norms := norms_of(model)):
            self.statistics = RunningStatistics(norms)

    def came_with(self, tensor: Tensor) -> bool:
        """Whether the model had this parameter or buffer when the session began, and still has."""
        place = self._first.get(id(tensor))
        return place is not None and getattr(place[0](), place[1], None) is tensor

    def _note_places(self) -> None:
        for module in self.model.modules():
            own = dict(module.named_parameters(recurse=False))
            places = {id(param): (weakref.ref(module), name) for name, param in own.items()}
            self._first.update(places)
            if self.policy is not None:
                self.places.update(places)
            for name, buffer in module.named_buffers(recurse=False):
                self._first[id(buffer)] = weakref.ref(module), name

    def uninstall(self) -> None:
        """Take hooks and conversions out.  No reference to the model stays in a cycle.

        Else its weights, and their gradients, would stay in memory until Python looks for cycles.
        """
        for call in list(here.stack):  # a session may end within its forward
            if call.begun_by is self or call.begun_by in self._overrides:
                self._state.end(call)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.held.take_out()
        if self._parts is not None:
            self._parts.forget()
            self._parts = None
        if self._copies is not None:
            self._copies.uninstall()
        if self.statistics is not None:
            self.statistics.close()
            self.statistics = None
        if self.lent is not None:
            self.lent.close()
            self.lent = None
        undo = UndoAll("ampatch: a model's weights get their dtypes back")
        self.conversions.restore_all(self.model, undo)
        undo.end()

    # What parts of the model ask

    def inputs_of(self, part: str = "") -> ModelInputs:
        """What casts the inputs of the model, or of a part."""
        assert self.in_dtype is not None
        name = type(self.model).__name__
        session, me = self._session, weakref.ref(self)

        def mix() -> None:
            if (managed := me()) is not None:
                session.mix(managed)

        return ModelInputs(f"{name}.{part}" if part else name, self.in_dtype, mix)

    def results_in_step(self) -> torch.dtype | None:
        """The dtype of what parts return in a step of a framework; None: any, or there is none."""
        for call in reversed(here.stack):
            if call.begun_by is self and call.results_in is not KEEP:
                return call.results_in
        return None

    # Around a forward

    def begin(
        self,
        root: nn.Module,
        args: tuple,
        kwargs: dict,
        inputs: ModelInputs | None,
        around: Lending | None = None,
        caller: FrameType | None = None,
    ) -> tuple[tuple, dict] | None:
        """A call begins: of the model, or of a part from outside.  Returns its arguments, cast.

        `around`: what is lent to the forward in which the model calls itself.
        """
        state, lent, given, taken = self._state, self.lent, None, None
        if inputs is not None:
            given = Given()
            taken = inputs.take(args, kwargs, given)
        policy = self.policy  # read after `take`: inputs that stay FP32 change it, as may lending
        is_given = given is not None and (given.tensors or given.containers)
        if not (is_given or lent or policy or state.process or here.stack):
            return taken
        call = state.begin(self, root, caller)
        try:
            call.input_casts = given
            call.computes_in = None if self._parts is None else self.in_dtype
            if lent is not None and around is None:
                if not is_traced_by_fx(args, kwargs):
                    lent.lend(call, root)
                    policy = self.policy
                if self._parts is not None and inputs is self._inputs:  # the whole model is called
                    call.removed_hooks = self._parts
                    self._parts.step_aside()
            if policy is None and lent is not None and state.in_half_models is not None:
                policy = state.in_half_models.in_type(lent.dtype)
            if len(here.stack) > 1:
                if self._parts is not None and not self._has_warned_of_block:
                    self._warn_of_settings()
                state.set_policy(call, *state.setting_of_forward(policy))
            elif policy is not state.process:
                state.set_policy(call, policy)
            if policy is not None:
                policy.cache.open(call, self._last_forward)
                if policy.devices is not None:
                    self._note_device(policy.devices)
        except BaseException:
            state.end(call)
            raise
        return taken

    def end(self, root: nn.Module) -> Call | None:
        """A call ends: of the model, or of a part from outside.  Returns it; None: there is none.

        What it wrote into its inputs is written into the caller's own.
        """
        call = None
        if not is_dynamo_compiling() and not here.stack[-1].is_recursive:  # without one more call
            last = here.stack[-1]
            call = last if last.begun_by is self and last.module is root else None
        call = call or self._state.call_to_end(self, root)
        if call is None:
            return None
        self._state.end(call)
        if call.opened_copies is not None and call.opened_copies.last is not None:
            call.opened_copies.last.note(call.opened_copies.used)
        if call.input_casts is not None:
            call.input_casts.write_back()
        return call

    def join(self, root: nn.Module, caller: FrameType | None = None) -> None:
        """A call begins that belongs to a forward around it, which casts and lends."""
        self._state.begin(self, root, caller).is_passive = True

    def begin_traced(
        self, root: nn.Module, args: tuple, kwargs: dict, inputs: ModelInputs | None
    ) -> tuple[tuple, dict] | None:
        """As `begin`, while Dynamo traces: strict export warns of each write, so of few."""
        state, policy, is_setting, taken = self._state, self.policy, True, None
        if inputs is not None:
            taken = inputs.take(args, kwargs, None)
        places = None
        if self.lent is not None and not is_traced_by_fx(args, kwargs):
            places = self.lent.lend_traced(root)
        if policy is None and self.lent is not None and state.in_half_models is not None:
            policy = state.in_half_models.in_type(self.lent.dtype)
        if here.stack:
            policy, _, is_setting = state.setting_of_forward(policy)
        if places is not None or not (policy is KEEP or policy is state.current()):
            call = state.begin(self, root)
            call.traced_places = places
            call.computes_in = None if self._parts is None else self.in_dtype
            state.set_policy(call, policy, (), is_setting)
        return taken

    def _enter(
        self, model: nn.Module, args: tuple, kwargs: dict, caller: FrameType | None = None
    ) -> tuple[tuple, dict] | None:
        state, is_traced, around = self._state, is_dynamo_compiling(), None
        if state.modes and not is_traced and is_mode_on():
            with unseen():
                return self._enter(model, args, kwargs, caller)
        if here.stack:
            if not is_traced:
                state.end_abandoned()
            around = None if self.lent is None else lending_around(model)
            if around is not None and around.lender is not self.lent:
                if not is_traced:
                    self.join(model, caller)
                return None
        if is_traced:
            return self.begin_traced(model, args, kwargs, self._inputs)
        if self._step is not None and self._step.enters():
            return None
        return self.begin(model, args, kwargs, self._inputs, around, caller)

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        state, is_traced, to = self._state, is_dynamo_compiling(), self.out_dtype
        if is_traced:
            return self._leave_traced(model, output)
        if state.modes and is_mode_on():
            with unseen():
                return self._leave(model, args, output)
        call = self.end(model) if here.stack else None
        if call is not None and call.is_passive:
            return None
        if self._step is not None and self._step.leaves():
            return None
        if output is None:  # perhaps because the forward raised
            dtype_errors.note(
                sys.exc_info()[1], self._why_half(), self._remedy(), self.held.name_of
            )
        if here.stack and self.properties.cast_model_outputs is None:
            to = computes_in() or to
        return None if to is None else cast_tensors(output, to)

    def _leave_traced(self, model: nn.Module, output: Any) -> Any:
        if here.stack:
            around = None if self.lent is None else lending_around(model)
            if around is not None and around.lender is not self.lent:
                return None
            self.end(model)
        return None if self.out_dtype is None else cast_tensors(output, self.out_dtype)

    def _warn_of_settings(self) -> None:
        if not any(call.kind == USER for call in here.stack):
            return
        self._has_warned_of_block = True
        logger.warning(
            "%s is called in a block of ampatch.disable_casts() or ampatch.precision(), which is "
            "about casts of calls: at %s weights and inputs are half, and nothing changes. For a "
            "forward in FP32: ampatch.unwrap(model)(...). For parts that stay FP32: "
            'overrides={"name.of.the.module": "float"}.',
            *(type(self.model).__name__, self.properties.opt_level),
        )

    @contextlib.contextmanager
    def in_step(self, step: FrameworkStep) -> Iterator[None]:
        """Context manager: a framework runs code around the model.

        At levels without half weights it changes nothing.
        """
        if self._parts is None:
            yield
            return
        before, call = self._step, Call()
        try:
            self._step = step
            call = self._state.enter(KEEP, begun_by=self)
            call.results_in = self.out_dtype
            yield
        finally:
            self._state.end(call)
            self._step = before

    def _why_half(self) -> str:
        name, level = type(self.model).__name__, self.properties.opt_level
        if self.policy is not None:
            return f"{name} is at {level}, whose casts make the listed calls' results half"
        return f"{name} is at {level}, with weights and inputs in {self.properties.cast_model_type}"

    def _remedy(self) -> str:
        if self.policy is not None:
            return (
                "keep the call that made it in FP32: see `overrides=` of ampatch.initialize and "
                'ampatch.precision("float").'
            )
        return (
            'keep the module in FP32: overrides={"name.of.the.module": "float"} of '
            "ampatch.initialize; or take O1, which computes what has no kernel for half in FP32."
        )

    def _note_device(self, devices: set[str]) -> None:
        """The model may have moved since: cast where it lives now."""
        parameter = next(self.model.parameters(), None)
        if parameter is not None:
            devices.add(parameter.device.type)

    def plain_copy(self) -> nn.Module:
        """A deep copy without hooks and patches."""
        assert self._copies is not None
        return self._copies.plain_copy()
