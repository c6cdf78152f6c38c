"""One model in a session: what is done around its calls, from `install` to `uninstall`.

`copy.deepcopy`, `pickle`, `torch.save(model)` and sending the model to another process give plain
models: weights as they are (O3: half, else FP32), usable where ampatch is not installed.
`copy.copy` and DataParallel's replicas share weights, and are cast as the model is while the
session is open.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..casting import dtype_errors
from ..casting.calls import INHERIT, USER_BLOCK, Call, CastState, computes_in, thread_calls
from ..casting.handlers import without_modes
from ..casting.held_functions import HeldFunctions
from ..casting.policy import Policy
from ..casting.weight_cache import WeightUseOrder
from ..config.opt_levels import HALF_DTYPES, Properties
from ..errors import UndoAll
from ..log import logger
from ..torch_private.torch_functions import is_mode_on
from .conversion import ConvertedWeights
from .half_copy_slots import StaysFloat
from .half_copy_swaps import HalfCopySwapper, Swap, enclosing_swap, half_copy_dtypes, is_fx_traced
from .io_casting import InputCasts, ModelInputs
from .module_overrides import ModuleOverride, has_float_buffers
from .own_frame import OwnFrame
from .running_statistics import RunningStatistics, norms_of
from .sharded_weights import checked_shards, sharded_parameters
from .submodule_calls import SubmoduleCalls
from .values import cast_tensors

_NAMES_SHOWN = 5  # names of weights in a warning

SlotsById = dict[int, tuple["weakref.ref[nn.Module]", str]]
"""By the id of a parameter: its module, and its name there.

Python reuses the id of a deleted parameter, so compare with the parameter in the slot.  A weak
reference to the parameter itself would make `torch.utils.swap_tensors` refuse it.
"""


class SessionForModel(Protocol):
    """What a managed model needs of its session."""

    def promote_mixed_dtypes(self, managed: ManagedModel) -> None:
        """Calls in the forward get FP32 and half arguments: give the model a policy for them."""


class ManagedModel:
    """A model under one opt level.

    Its forward runs under `policy`: at O1 the session's tables; at the other levels None, and no
    call is cast.  Exception: `CastState.half_model_policy`, if set, is the policy at O2 and O3.
    Floating inputs are cast to `in_dtype`, outputs to `out_dtype`; None: they are left as they are.
    It is the `Scope` of the model's frame.
    """

    def __init__(
        self,
        model: nn.Module,
        properties: Properties,
        session: SessionForModel,
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
        self.swapper: HalfCopySwapper | None = None
        self._stays_float: StaysFloat = lambda module: False
        self._has_mixed_dtypes = False  # FP32 buffers meet half tensors in its forward
        self.frame: OwnFrame | None = None
        self.slots: SlotsById = {}  # of parameters: calls with them are cast outside forwards too
        self._initial_slots: SlotsById = {}  # parameters and buffers as the session began
        self.held_functions = HeldFunctions(model)
        self.statistics: RunningStatistics | None = None
        self._was_called = False  # since the last `warn_of_lost_frame`
        self._has_warned_of_user_block = False
        self._has_warned_of_lost_frame = False
        self._use_order: WeightUseOrder | None = None
        if policy is not None:
            self._use_order = WeightUseOrder(model, policy.half_to)

    # Put in, take out

    def convert(self, stays_float: StaysFloat) -> None:
        """Use half copies of weights in forwards, or convert weights and buffers to `in_dtype`."""
        dtype = self.in_dtype
        if dtype is None:
            return
        self._stays_float = stays_float
        if not self.properties.uses_half_copies:
            excluded = sharded_parameters(self.model).union(half_copy_dtypes(self.model))
            self.conversions.convert(self.model, dtype, stays_float, excluded)
        if dtype in HALF_DTYPES:
            self.swapper = HalfCopySwapper(self.model, dtype, stays_float, self._on_module_change)
            self.swapper.open()

    def check_shards(self) -> None:
        """Raise `AmpatchError` where the precision of FSDP2 contradicts the level."""
        if checked_shards(self.model, self.properties, self._stays_float):
            # `fully_shard` has replaced converted parameters.
            tensors = (*self.model.parameters(), *self.model.buffers())
            self.conversions.forget(set(self.conversions.entries) - set(map(id, tensors)))

    def _on_module_change(self) -> None:
        """Give new submodules frames, and look for FP32 buffers, which meet half in the forward."""
        if self._submodules is not None and self.swapper is not None:
            self._submodules.install(self.swapper.weight_ids())
        had_mixed_dtypes = self._has_mixed_dtypes
        self._has_mixed_dtypes = has_float_buffers(self.model, self._stays_float)
        if self._has_mixed_dtypes and not had_mixed_dtypes:
            self._session.promote_mixed_dtypes(self)

    def restore_shared(self, shared: Collection[int]) -> set[int]:
        """Change these weights (ids) back to FP32: another model is to make half copies of them.

        Returns the ids of those that were half.
        """
        converted = set(self.conversions.entries) & set(shared)
        if converted:
            self.conversions.restore(converted)
            if self.swapper is not None:
                self.swapper.open()
        return converted

    def warn_of_half_weights(self) -> None:
        """O1 and O2 train FP32 parameters: warn of those that were half before."""
        patches = self.properties.patch_torch_functions
        if not patches and not self.properties.uses_half_copies:
            return
        half_names = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.dtype in HALF_DTYPES
        ]
        if half_names:
            left = len(half_names) - _NAMES_SHOWN
            logger.warning(
                "%s: these trainable weights were given in half and are trained in half, without "
                "FP32 master weights: %s%s. For master weights call model.float() before "
                "ampatch.initialize.",
                type(self.model).__name__,
                ", ".join(half_names[:_NAMES_SHOWN]),
                f" and {left} more" if left > 0 else "",
            )

    def has_half_copy(self, parameter: Tensor) -> bool:
        """Whether the forward computes with a half copy of this weight."""
        return self.swapper is not None and id(parameter) in self.swapper.weight_ids()

    def record_wanted_grads(self, wanted: Collection[int]) -> bool:
        """As `WeightUseOrder.record_wanted_grads`, for both kinds of half copies."""
        order, swapper = self._use_order, self.swapper
        may_share = order is not None and order.record_wanted_grads(wanted)
        return (swapper is not None and swapper.record_wanted_grads(wanted)) or may_share

    def converted_ids(self) -> set[int]:
        """Ids of the tensors whose dtype is changed."""
        return set(self.conversions.entries)

    def forget_originals(self) -> None:
        """Drop the unconverted values."""
        self.conversions.forget_originals()

    def install(self) -> None:
        """Put in the frames of the model and of submodules, overridden or called from outside."""
        model = self.model
        if self.policy is not None and self.policy.devices is not None:
            self.policy.devices.update(param.device.type for param in model.parameters())
        self._record_slots()
        if self.in_dtype is not None:
            self._inputs = self.inputs_of()
        for override in self._overrides:
            override.install()
        if self.swapper is not None:
            self._submodules = SubmoduleCalls(self, self._stays_float)
            self._submodules.install(self.swapper.weight_ids())
        self.frame = OwnFrame(model, self)
        self.frame.put_on_model(self.properties.opt_level)
        if self.properties.loss_scale == "dynamic" and (norms := norms_of(model)):
            self.statistics = RunningStatistics(norms)

    def had_at_start(self, tensor: Tensor) -> bool:
        """Whether the model had this parameter or buffer when the session began, and still has."""
        slot = self._initial_slots.get(id(tensor))
        return slot is not None and getattr(slot[0](), slot[1], None) is tensor

    def _record_slots(self) -> None:
        for module in self.model.modules():
            params = dict(module.named_parameters(recurse=False))
            slots = {id(param): (weakref.ref(module), name) for name, param in params.items()}
            self._initial_slots.update(slots)
            if self.policy is not None:
                self.slots.update(slots)
            for name, buffer in module.named_buffers(recurse=False):
                self._initial_slots[id(buffer)] = weakref.ref(module), name

    def uninstall(self) -> None:
        """Take frames and conversions out, and leave no reference cycle through the model.

        A cycle would keep weights and gradients in memory until Python collects garbage.
        """
        for call in list(thread_calls.stack):  # a session may end within its forward
            if call.owner is self or call.owner in self._overrides:
                self._state.exit(call)
        self.held_functions.take_out()
        if self.frame is not None:
            self.frame.take_out()
            self.frame = None
        if self._submodules is not None:
            self._submodules.frames.install((), self._submodules)
            self._submodules = None
        for override in self._overrides:
            override.uninstall()
        self.statistics = None
        if self.swapper is not None:
            self.swapper.close()
            self.swapper = None
        undo = UndoAll("ampatch: a model's weights get their dtypes back")
        self.conversions.restore_all(self.model, undo)
        undo.end()

    # What submodules ask

    def inputs_of(self, submodule: str = "") -> ModelInputs:
        """The `ModelInputs` that cast the inputs of the model, or of a submodule."""
        assert self.in_dtype is not None
        name = type(self.model).__name__
        session, weak_self = self._session, weakref.ref(self)

        def promote() -> None:
            if (managed := weak_self()) is not None:
                session.promote_mixed_dtypes(managed)

        return ModelInputs(f"{name}.{submodule}" if submodule else name, self.in_dtype, promote)

    def step_output_dtype(self) -> torch.dtype | None:
        """What submodules return in a framework's step; None: any dtype, or there is no step."""
        for call in reversed(thread_calls.stack):
            if call.owner is self and call.results_in is not INHERIT:
                return call.results_in
        return None

    # Around a call

    def enter(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Begin a call: cast the inputs, swap in half copies, set the policy.

        Returns the cast arguments.  None: the model is a submodule of another managed model, whose
        running forward has done this for its submodules.
        """
        self._was_called = True
        if self._state.threads_in_modes and is_mode_on():
            with without_modes():
                return self.enter(call, module, args, kwargs)
        enclosing = None
        if thread_calls.stack and self.swapper is not None:
            enclosing = enclosing_swap(module)
            if enclosing is not None and enclosing.swapper is not self.swapper:
                return None
        return self.enter_with_inputs(self._inputs, call, module, args, kwargs, enclosing)

    def enter_with_inputs(
        self,
        inputs: ModelInputs | None,
        call: Call,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        enclosing: Swap | None = None,
    ) -> tuple[tuple, dict]:
        """A call of the model or of a submodule begins.  Returns its arguments, cast.

        `enclosing`: the swap of the forward in which the model calls itself.
        """
        state, swapper = self._state, self.swapper
        casts = None
        if inputs is not None:
            casts = InputCasts()
            args, kwargs = inputs.cast(args, kwargs, casts)
        policy = self.policy  # after the casts: inputs that stay FP32 replace it, and `swap_in` may
        has_casts = casts is not None and (casts.tensors or casts.containers)
        if not (has_casts or swapper or policy or state.process_policy or thread_calls.stack):
            return args, kwargs
        state.enter(call, self)
        call.input_casts = casts
        call.computes_in = None if self._submodules is None else self.in_dtype
        if swapper is not None and enclosing is None and not is_fx_traced(args, kwargs):
            swapper.swap_in(call, module)
            policy = self.policy
            if inputs is self._inputs and call.swap is not None and self._submodules is not None:
                call.removed_frames = self._submodules.frames  # the call is of the whole model
                call.removed_frames.remove()
        if policy is None and swapper is not None and state.half_model_policy is not None:
            policy = state.half_model_policy.with_half_dtype(swapper.dtype)
        if len(thread_calls.stack) > 1:
            if swapper is not None and not self._has_warned_of_user_block:
                self._warn_of_user_block()
            state.set_policy(call, *state.policy_of_forward(policy))
        elif policy is not state.process_policy:
            state.set_policy(call, policy)
        if policy is not None:
            policy.cache.open(call, self._use_order)
            if policy.devices is not None:
                self._record_device(policy.devices)
        return args, kwargs

    def exit(self, call: Call) -> None:
        """A call has ended: write what it wrote into cast inputs into the caller's objects."""
        if self._state.threads_in_modes and is_mode_on():
            with without_modes():
                return self.exit(call)
        if call.owner is not None:  # else `enter` has not put it on the stack
            self._state.exit(call)
        copies, casts = call.opened_copies, call.input_casts
        if copies is not None and copies.order is not None:
            copies.order.record(copies.used_weights)
        if casts is not None:
            call.input_casts = None
            casts.write_back()

    def convert_output(self, output: Any) -> Any:
        """The model's outputs, in the dtype that the code around the call wants."""
        if self._state.threads_in_modes and is_mode_on():
            with without_modes():
                return self.convert_output(output)
        dtype = self.out_dtype
        if thread_calls.stack and self.properties.cast_model_outputs is None:
            dtype = computes_in() or dtype
        return output if dtype is None else cast_tensors(output, dtype)

    def on_error(self, error: BaseException) -> None:
        """Add a note to an error about dtypes: which tensors are half, and why."""
        dtype_errors.explain(error, self._why_half(), self._remedy(), self.held_functions.name_of)

    def run_traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The whole call, where Dynamo traces it."""
        enclosing = (
            enclosing_swap(module) if thread_calls.stack and self.swapper is not None else None
        )
        if enclosing is not None and enclosing.swapper is not self.swapper:
            return forward(module, *args, **kwargs)
        output = self.run_traced_with_inputs(self._inputs, forward, module, args, kwargs)
        return output if self.out_dtype is None else cast_tensors(output, self.out_dtype)

    def run_traced_with_inputs(
        self,
        inputs: ModelInputs | None,
        forward: Callable,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """As `enter_with_inputs`, then the forward.

        It sets few attributes, because strict export warns of each.
        """
        state, policy = self._state, self.policy
        sets_policy = True
        slots = None
        if inputs is not None:
            args, kwargs = inputs.cast(args, kwargs, None)
        if self.swapper is not None and not is_fx_traced(args, kwargs):
            slots = self.swapper.swap_in_traced(module)
        if policy is None and self.swapper is not None and state.half_model_policy is not None:
            policy = state.half_model_policy.with_half_dtype(self.swapper.dtype)
        if thread_calls.stack:
            policy, _, sets_policy = state.policy_of_forward(policy)
        if slots is None and (policy is INHERIT or policy is state.current()):
            return forward(module, *args, **kwargs)
        call = Call()
        call.is_traced = True
        try:
            state.enter(call, self)
            call.traced_swap = slots
            call.computes_in = None if self._submodules is None else self.in_dtype
            state.set_policy(call, policy, (), sets_policy)
            return forward(module, *args, **kwargs)
        finally:
            state.exit(call)

    def warn_of_lost_frame(self, trained: Iterable[Tensor]) -> None:
        """Warn once that the model is not cast any more, if its own frame is not called any more.

        The script has replaced `forward`, and a `scale_loss` block for the parameters `trained`
        begins.  A new `forward` that calls the frame still casts, and sets `_was_called`.
        """
        if set(map(id, trained)).isdisjoint(map(id, self.model.parameters())):
            return
        if self._was_called or self._has_warned_of_lost_frame:
            self._was_called = False
            return
        self._has_warned_of_lost_frame = True
        logger.warning(
            "%s.forward was replaced or deleted after ampatch.initialize, and the one it has now "
            "does not call the earlier one: the model is not cast any more. Replace it, or take "
            "the hooks of a library out, before initialize; or call the earlier model.forward.",
            type(self.model).__name__,
        )

    def _warn_of_user_block(self) -> None:
        """Warn once that `disable_casts` and `precision` do not change half weights."""
        if not any(call.kind == USER_BLOCK for call in thread_calls.stack):
            return
        self._has_warned_of_user_block = True
        logger.warning(
            "%s is called in a block of ampatch.disable_casts() or ampatch.precision(). The block "
            "changes casts of calls only; at %s weights and inputs are half, so it has no effect. "
            "For a forward in FP32: ampatch.unwrap(model)(...). For submodules in FP32: "
            'overrides={"name.of.the.module": "float"}.',
            type(self.model).__name__,
            self.properties.opt_level,
        )

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Context manager for a framework's step, which calls submodules outside of forwards.

        It changes nothing for a model that is not half.
        """
        if self._submodules is None:
            yield
            return
        call = Call()
        try:
            self._state.enter(call, self)
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

    def _record_device(self, devices: set[str]) -> None:
        """Cast on the device of the model, which may have moved since the last call."""
        parameter = next(self.model.parameters(), None)
        if parameter is not None:
            devices.add(parameter.device.type)
