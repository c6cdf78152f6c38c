"""One model in a session: what is done around its calls, put in and taken out exactly.

`copy.deepcopy`, `pickle`, `torch.save(model)` and sending it to another process
give plain models: weights as they are (O3: half, else FP32), usable where ampatch is not
installed.
`copy.copy` and DataParallel's replicas share weights: they are cast as the model is, for as long
as the session is open.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..casting import dtype_errors
from ..casting.batched_casts import LastForward
from ..casting.calls import KEEP, USER, Call, CastState, computes_in, here
from ..casting.handlers import unseen
from ..casting.held_functions import HeldFunctions
from ..casting.policy import Policy
from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import UndoAll
from ..log import logger
from ..torch_private.torch_functions import is_mode_on
from .conversion import ConvertedWeights
from .io_casting import Given, ModelInputs
from .lent_places import StaysFloat
from .lent_weights import Lending, LentWeights, is_traced_by_fx, lending_around, lent_types
from .module_overrides import ModuleOverride, has_float_buffers
from .own_frame import OwnFrame
from .running_statistics import RunningStatistics, norms_of
from .sharded_weights import checked_shards, sharded_parameters
from .submodule_calls import SubmoduleCalls
from .values import cast_tensors

_SHOWN = 5  # weights named in a warning

Places = dict[int, tuple["weakref.ref[nn.Module]", str]]
"""Where parameters stand, by their ids: in which module, under which name.

An id comes again when its parameter is gone.  A reference to the parameter itself would keep
torch from swapping it.
"""


class OwnSession(Protocol):
    """What a managed model needs of the session that it is in."""

    def promote_mixed_dtypes(self, managed: ManagedModel) -> None:
        """FP32 meets half in the forward: give the model a policy that casts such calls."""


class ManagedModel:
    """A model under one opt level.

    `policy` is what the model's forward runs under: the session's rules at O1,
    None (no casting) at O0, and at O2 and O3, where `CastState.in_half_models` stands
    for None.  `in_dtype` and `out_dtype` are the dtypes that floating inputs and
    outputs are cast to; None: they are left as they are.
    It is the `Scope` of the model's frame.
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
        self._submodules: SubmoduleCalls | None = None
        self._overrides = overrides
        self.conversions = ConvertedWeights()
        self.lent: LentWeights | None = None
        self._stays_float: StaysFloat = lambda module: False
        self._mixes = False  # FP32 buffers meet half tensors in its forward
        self.frame: OwnFrame | None = None
        self.places: Places = {}  # parameters whose calls are cast outside forwards
        self._first: Places = {}  # the parameters and buffers that it came with
        self.held = HeldFunctions(model)
        self.statistics: RunningStatistics | None = None
        self._was_called = False  # since `look_for_frame`
        self._has_warned_of_block = self._has_warned_of_forward = False
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
        if not self.properties.uses_half_copies:
            leave = sharded_parameters(self.model).union(lent_types(self.model))
            self.conversions.convert(self.model, dtype, stays_float, leave)
        if dtype in HALF_TYPES:
            self.lent = LentWeights(self.model, dtype, stays_float, self._look_at_parts)
            self.lent.open()

    def check_shards(self) -> None:
        """Raise `AmpatchError` where the precision of FSDP2 contradicts the level."""
        if checked_shards(self.model, self.properties, self._stays_float):
            # `fully_shard` has replaced converted parameters.
            tensors = (*self.model.parameters(), *self.model.buffers())
            self.conversions.forget(set(self.conversions.entries) - set(map(id, tensors)))

    def _look_at_parts(self) -> None:
        """New submodules get frames; FP32 buffers with a dimension meet half in the forward."""
        if self._submodules is not None:
            self._give_frames(self._submodules)
        mixed, self._mixes = self._mixes, has_float_buffers(self.model, self._stays_float)
        if self._mixes and not mixed:
            self._session.promote_mixed_dtypes(self)

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
        if not patches and not self.properties.uses_half_copies:
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
        """Give the model, its overridden submodules and those that can be called frames."""
        model = self.model
        if self.policy is not None and self.policy.devices is not None:
            self.policy.devices.update(param.device.type for param in model.parameters())
        self._note_places()
        if self.in_dtype is not None:
            self._inputs = self.inputs_of()
        for override in self._overrides:
            override.install()
        if self.lent is not None:
            self._submodules = SubmoduleCalls(self, self._state)
            self._give_frames(self._submodules)
        self.frame = OwnFrame(model, self)
        self.frame.put_on_model(self.properties.opt_level)
        if self.properties.loss_scale == "dynamic" and (norms := norms_of(model)):
            self.statistics = RunningStatistics(norms)

    def _give_frames(self, submodules: SubmoduleCalls) -> None:
        assert self.lent is not None
        submodules.install(self.lent.ids() if submodules.lends else None, self._stays_float)

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
        """Take frames and conversions out.  No reference to the model stays in a cycle.

        Else its weights, and their gradients, would stay in memory until Python looks for cycles.
        """
        for call in list(here.stack):  # a session may end within its forward
            if call.owner is self or call.owner in self._overrides:
                self._state.end(call)
        self.held.take_out()
        if self.frame is not None:
            self.frame.take_out()
            self.frame = None
        if self._submodules is not None:
            self._submodules.frames.take_out()
            self._submodules = None
        for override in self._overrides:
            override.uninstall()
        self.statistics = None
        if self.lent is not None:
            self.lent.close()
            self.lent = None
        undo = UndoAll("ampatch: a model's weights get their dtypes back")
        self.conversions.restore_all(self.model, undo)
        undo.end()

    # What submodules ask

    def inputs_of(self, submodule: str = "") -> ModelInputs:
        """What casts the inputs of the model, or of a submodule."""
        assert self.in_dtype is not None
        name = type(self.model).__name__
        session, me = self._session, weakref.ref(self)

        def mix() -> None:
            if (managed := me()) is not None:
                session.promote_mixed_dtypes(managed)

        return ModelInputs(f"{name}.{submodule}" if submodule else name, self.in_dtype, mix)

    def results_in_step(self) -> torch.dtype | None:
        """What submodules return in a framework's step; None: any dtype, or there is no step."""
        for call in reversed(here.stack):
            if call.owner is self and call.results_in is not KEEP:
                return call.results_in
        return None

    # Around a call

    def begin(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """The model is called.  None: it is a submodule of a model whose forward runs."""
        around, self._was_called = None, True
        if self._state.modes and is_mode_on():
            with unseen():
                return self.begin(call, module, args, kwargs)
        if here.stack and self.lent is not None:
            around = lending_around(module)
            if around is not None and around.lender is not self.lent:
                return None
        return self.begin_with(self._inputs, call, module, args, kwargs, around)

    def begin_with(
        self,
        inputs: ModelInputs | None,
        call: Call,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        around: Lending | None = None,
    ) -> tuple[tuple, dict]:
        """A call of the model or of a submodule begins.  Returns its arguments, cast.

        `around`: what is lent to the forward in which the model calls itself.
        """
        state, lent, given = self._state, self.lent, None
        if inputs is not None:
            given = Given()
            args, kwargs = inputs.take(args, kwargs, given)
        policy = self.policy  # read after `take`: inputs that stay FP32 change it, as may lending
        is_given = given is not None and (given.tensors or given.containers)
        if not (is_given or lent or policy or state.process or here.stack):
            return args, kwargs
        state.begin(call, self)
        call.input_casts = given
        call.computes_in = None if self._submodules is None else self.in_dtype
        if lent is not None and around is None and not is_traced_by_fx(args, kwargs):
            lent.lend(call, module)
            policy = self.policy
            if inputs is self._inputs and call.lending is not None and self._submodules is not None:
                call.removed_frames = self._submodules.frames  # the whole model is called
                call.removed_frames.step_aside()
        if policy is None and lent is not None and state.in_half_models is not None:
            policy = state.in_half_models.in_type(lent.dtype)
        if len(here.stack) > 1:
            if lent is not None and not self._has_warned_of_block:
                self._warn_of_settings()
            state.set_policy(call, *state.setting_of_forward(policy))
        elif policy is not state.process:
            state.set_policy(call, policy)
        if policy is not None:
            policy.cache.open(call, self._last_forward)
            if policy.devices is not None:
                self._note_device(policy.devices)
        return args, kwargs

    def end(self, call: Call) -> None:
        """A call has ended.  What it wrote into its inputs is written into the caller's own."""
        if self._state.modes and is_mode_on():
            with unseen():
                return self.end(call)
        if call.owner is not None:  # else it has not begun
            self._state.end(call)
        copies, casts = call.opened_copies, call.input_casts
        if copies is not None and copies.last is not None:
            copies.last.note(copies.used)
        if casts is not None:
            call.input_casts = None
            casts.write_back()

    def results(self, output: Any) -> Any:
        """The model's outputs, in the dtype that the code around the call wants."""
        if self._state.modes and is_mode_on():
            with unseen():
                return self.results(output)
        to = self.out_dtype
        if here.stack and self.properties.cast_model_outputs is None:
            to = computes_in() or to
        return output if to is None else cast_tensors(output, to)

    def failed(self, error: BaseException) -> None:
        """An error about dtypes says which tensors are half."""
        dtype_errors.note(error, self._why_half(), self._remedy(), self.held.name_of)

    def traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The whole call."""
        around = lending_around(module) if here.stack and self.lent is not None else None
        if around is not None and around.lender is not self.lent:
            return forward(module, *args, **kwargs)
        output = self.traced_with(self._inputs, forward, module, args, kwargs)
        return output if self.out_dtype is None else cast_tensors(output, self.out_dtype)

    def traced_with(
        self,
        inputs: ModelInputs | None,
        forward: Callable,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """As `begin_with`, and the forward: strict export warns of each write, so of few."""
        state, policy, is_setting, places = self._state, self.policy, True, None
        if inputs is not None:
            args, kwargs = inputs.take(args, kwargs, None)
        if self.lent is not None and not is_traced_by_fx(args, kwargs):
            places = self.lent.lend_traced(module)
        if policy is None and self.lent is not None and state.in_half_models is not None:
            policy = state.in_half_models.in_type(self.lent.dtype)
        if here.stack:
            policy, _, is_setting = state.setting_of_forward(policy)
        if places is None and (policy is KEEP or policy is state.current()):
            return forward(module, *args, **kwargs)
        call = Call()
        call.is_traced = True
        try:
            state.begin(call, self)
            call.traced_places = places
            call.computes_in = None if self._submodules is None else self.in_dtype
            state.set_policy(call, policy, (), is_setting)
            return forward(module, *args, **kwargs)
        finally:
            state.end(call)

    def look_for_frame(self, trained: Iterable[Tensor]) -> None:
        """A block of `scale_loss` begins for these parameters; the script has replaced `forward`.

        Say once that the casts are gone if what it has put there does not call the model's frame:
        that was not called since the last block which trains the model.
        """
        if set(map(id, trained)).isdisjoint(map(id, self.model.parameters())):
            return
        if self._was_called or self._has_warned_of_forward:
            self._was_called = False
            return
        self._has_warned_of_forward = True
        logger.warning(
            "%s.forward was replaced or deleted after ampatch.initialize, and the one it has now "
            "does not call the earlier one: the model is not cast any more. Replace it, or take "
            "the hooks of a library out, before initialize; or call the earlier model.forward.",
            type(self.model).__name__,
        )

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
    def in_step(self) -> Iterator[None]:
        """Context manager: a framework runs code around the model, which calls its submodules.

        At levels without half weights it changes nothing.
        """
        if self._submodules is None:
            yield
            return
        call = Call()
        try:
            self._state.begin(call, self)
            call.results_in = self.out_dtype
            yield
        finally:
            self._state.remove(call)

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
