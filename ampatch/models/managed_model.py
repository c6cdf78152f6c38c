"""One model in a session: the work around its calls, from `install` to `uninstall`.

`copy.deepcopy`, `pickle`, `torch.save(model)` and sending the model to another process make plain
models: weights as they are (O3: half, else FP32), usable where ampatch is not installed.
`copy.copy` and DataParallel's replicas share weights, and are cast like the model while the session
is open.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..casting import dtype_errors
from ..casting.calls import (
    INHERIT,
    USER_BLOCK,
    Call,
    CastState,
    current_compute_dtype,
    thread_calls,
)
from ..casting.handlers import without_torch_function_modes
from ..casting.held_functions import HeldFunctions
from ..casting.policy import Policy
from ..casting.weight_cache import WeightUsage
from ..config.opt_levels import HALF_DTYPES, Properties
from ..errors import UndoAll
from ..log import logger
from ..torch_private.torch_functions import is_torch_function_mode_enabled
from .conversion import ConvertedWeights
from .half_copy_slots import Fp32Predicate
from .half_copy_swaps import HalfCopySwapper, Swap, enclosing_swap, half_copy_dtypes, is_fx_traced
from .io_casting import InputCaster, InputCasts
from .module_overrides import ModuleOverride, has_fp32_buffers
from .own_frame import OwnFrame
from .running_statistics import RunningStatistics, norms_of
from .sharded_weights import checked_sharded_parameters, sharded_parameters
from .submodule_calls import SubmoduleCalls
from .values import cast_tensors

_MAX_NAMES_SHOWN = 5  # the maximum number of weights that a warning names


class ParameterOwner(NamedTuple):
    """The module that has a parameter, and the parameter's name there."""

    module: weakref.ref[nn.Module]
    name: str


ParameterOwners = dict[int, ParameterOwner]
"""Owners by the id of their parameter.

Python reuses the id of a deleted parameter, so compare with the parameter that the module has under
this name.  `torch.utils.swap_tensors` would refuse parameters with weak references.
"""


class SessionForModel(Protocol):
    """What a managed model needs of its session."""

    def promote_mixed_dtypes(self, managed: ManagedModel) -> None:
        """Give the model a policy that promotes calls with both FP32 and half arguments."""


class ManagedModel:
    """A model under one opt level.

    Its forward runs under `policy`: at O1 the policy of the op tables, at the other levels None (no
    call is cast).  Two exceptions at O2 and O3: `promote_mixed_dtypes` sets `policy`; and while a
    handle of `init` is active, `CastState.half_model_policy` replaces None.  Floating inputs are
    cast to `in_dtype`, outputs to `out_dtype`, unless the dtype is None.  It is the `CallScope` of
    the model's frame.
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
        self._input_caster: InputCaster | None = None
        self._submodule_calls: SubmoduleCalls | None = None
        self._overrides = overrides
        self.conversions = ConvertedWeights()
        # At O2 and O3; at O3 it only records which modules belong to the running forward.
        self.swapper: HalfCopySwapper | None = None
        self._stays_fp32: Fp32Predicate = lambda module: False
        self._has_mixed_dtypes = False  # its forward has FP32 buffers and half tensors
        self.frame: OwnFrame | None = None
        self.parameter_owners: ParameterOwners = {}  # at O1: calls with these parameters are cast
        self._initial_owners: ParameterOwners = {}  # parameters and buffers at the session's start
        self.held_functions = HeldFunctions(model)
        self.running_statistics: RunningStatistics | None = None
        self._was_called = False  # `enter` has run since the last `warn_of_lost_frame`
        self._has_warned_of_user_block = False
        self._has_warned_of_lost_frame = False
        self._weight_usage: WeightUsage | None = None
        if policy is not None:
            self._weight_usage = WeightUsage(model, policy.half_rows_to)

    # Install and uninstall

    def convert(self, stays_fp32: Fp32Predicate) -> None:
        """Use half copies of weights in forwards, or convert weights and buffers to `in_dtype`."""
        dtype = self.in_dtype
        if dtype is None:
            return
        self._stays_fp32 = stays_fp32
        if not self.properties.uses_half_copies:
            excluded = sharded_parameters(self.model).union(half_copy_dtypes(self.model))
            self.conversions.convert(self.model, dtype, stays_fp32, excluded)
        if dtype in HALF_DTYPES:
            self.swapper = HalfCopySwapper(self.model, dtype, stays_fp32, self._on_module_change)
            self.swapper.open()

    def check_shards(self) -> None:
        """Raise `AmpatchError` if the precision of FSDP2 contradicts the opt level."""
        if checked_sharded_parameters(self.model, self.properties, self._stays_fp32):
            # `fully_shard` has replaced converted parameters.
            tensors = (*self.model.parameters(), *self.model.buffers())
            self.conversions.forget(set(self.conversions.entries) - set(map(id, tensors)))

    def _on_module_change(self) -> None:
        """Give new submodules frames, and promote mixed dtypes if there are FP32 buffers now."""
        if self._submodule_calls is not None and self.swapper is not None:
            self._submodule_calls.update_frames(self.swapper.weight_ids())
        had_mixed_dtypes = self._has_mixed_dtypes
        self._has_mixed_dtypes = has_fp32_buffers(self.model, self._stays_fp32)
        if self._has_mixed_dtypes and not had_mixed_dtypes:
            self._session.promote_mixed_dtypes(self)

    def restore_fp32_weights(self, shared: Collection[int]) -> set[int]:
        """Change these weights (ids) back to FP32: an O2 model that shares them makes half copies.

        Returns the ids of the weights that were changed.
        """
        converted = set(self.conversions.entries) & set(shared)
        if converted:
            self.conversions.restore(converted)
            if self.swapper is not None:
                self.swapper.open()
        return converted

    def warn_of_half_weights(self) -> None:
        """Warn about trainable parameters that are already half: O1 and O2 expect FP32 ones."""
        patches = self.properties.patch_torch_functions
        if not patches and not self.properties.uses_half_copies:
            return
        half_names = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.dtype in HALF_DTYPES
        ]
        if half_names:
            left = len(half_names) - _MAX_NAMES_SHOWN
            logger.warning(
                "%s: these trainable parameters were already half when ampatch.initialize was "
                "called, so they have no FP32 master weights: %s%s. Call model.float() before "
                "ampatch.initialize.",
                type(self.model).__name__,
                ", ".join(half_names[:_MAX_NAMES_SHOWN]),
                f" and {left} more" if left > 0 else "",
            )

    def has_half_copy(self, parameter: Tensor) -> bool:
        """Whether the forward computes with a half copy of this weight."""
        return self.swapper is not None and id(parameter) in self.swapper.weight_ids()

    def record_wanted_grads(self, wanted: Collection[int]) -> bool:
        """Like `WeightUsage.record_wanted_grads`, for the half copies at O1 and at O2."""
        usage, swapper = self._weight_usage, self.swapper
        may_share = usage is not None and usage.record_wanted_grads(wanted)
        return (swapper is not None and swapper.record_wanted_grads(wanted)) or may_share

    def converted_ids(self) -> set[int]:
        """Ids of the tensors whose dtype the opt level has changed."""
        return set(self.conversions.entries)

    def forget_originals(self) -> None:
        """Drop the FP32 originals of converted weights; only a failed `initialize` needs them."""
        self.conversions.forget_originals()

    def install(self) -> None:
        """Give frames to the model and to submodules that are overridden or called from outside."""
        model = self.model
        if self.policy is not None and self.policy.devices is not None:
            self.policy.devices.update(param.device.type for param in model.parameters())
        self._record_owners()
        if self.in_dtype is not None:
            self._input_caster = self.make_input_caster()
        for override in self._overrides:
            override.install()
        if self.swapper is not None:
            self._submodule_calls = SubmoduleCalls(self, self._stays_fp32)
            self._submodule_calls.update_frames(self.swapper.weight_ids())
        self.frame = OwnFrame(model, self)
        self.frame.install_on_model(self.properties.opt_level)
        if self.properties.loss_scale == "dynamic" and (norms := norms_of(model)):
            self.running_statistics = RunningStatistics(norms)

    def had_at_session_start(self, tensor: Tensor) -> bool:
        """Whether this was the model's parameter or buffer at the session's start, and still is."""
        owner = self._initial_owners.get(id(tensor))
        return owner is not None and getattr(owner.module(), owner.name, None) is tensor

    def _record_owners(self) -> None:
        for module in self.model.modules():
            params = dict(module.named_parameters(recurse=False))
            owners = {
                id(p): ParameterOwner(weakref.ref(module), name) for name, p in params.items()
            }
            self._initial_owners.update(owners)
            if self.policy is not None:
                self.parameter_owners.update(owners)
            for name, buffer in module.named_buffers(recurse=False):
                self._initial_owners[id(buffer)] = ParameterOwner(weakref.ref(module), name)

    def uninstall(self) -> None:
        """Undo `install` and `convert`, and leave no reference cycle through the model.

        A cycle would keep weights and gradients in memory until Python collects garbage.
        """
        for call in list(thread_calls.stack):  # a session may end within its forward
            if call.owner is self or call.owner in self._overrides:
                self._state.exit(call)
        self.held_functions.bind_originals()
        if self.frame is not None:
            self.frame.uninstall()
            self.frame = None
        if self._submodule_calls is not None:
            self._submodule_calls.frames.set_modules((), self._submodule_calls)
            self._submodule_calls = None
        for override in self._overrides:
            override.uninstall()
        self.running_statistics = None
        if self.swapper is not None:
            self.swapper.close()
            self.swapper = None
        undo = UndoAll("ampatch: restoring the dtypes of a model's weights")
        self.conversions.restore_all(self.model, undo)
        undo.end()

    # Called by SubmoduleCalls

    def make_input_caster(self, submodule: str = "") -> InputCaster:
        """An `InputCaster` for the inputs of the model, or of a submodule."""
        assert self.in_dtype is not None
        name = type(self.model).__name__
        session, weak_self = self._session, weakref.ref(self)

        def promote() -> None:
            if (managed := weak_self()) is not None:
                session.promote_mixed_dtypes(managed)

        return InputCaster(f"{name}.{submodule}" if submodule else name, self.in_dtype, promote)

    def step_output_dtype(self) -> torch.dtype | None:
        """The dtype of submodule outputs in a framework's step; None if not fixed, or no step."""
        for call in reversed(thread_calls.stack):
            if call.owner is self and call.step_output_dtype is not INHERIT:
                return call.step_output_dtype
        return None

    # Enter and exit

    def enter(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Enter a call: cast the inputs, swap in half copies, set the policy.

        Returns the cast arguments.  Returns None if the model is a submodule of another managed
        model whose forward is running: that forward has done this for all its submodules.
        """
        self._was_called = True
        if self._state.threads_in_function_modes and is_torch_function_mode_enabled():
            with without_torch_function_modes():
                return self.enter(call, module, args, kwargs)
        enclosing = None
        if thread_calls.stack and self.swapper is not None:
            enclosing = enclosing_swap(module)
            if enclosing is not None and enclosing.swapper is not self.swapper:
                return None
        return self.enter_with_input_caster(
            self._input_caster, call, module, args, kwargs, enclosing
        )

    def enter_with_input_caster(
        self,
        input_caster: InputCaster | None,
        call: Call,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        enclosing: Swap | None = None,
    ) -> tuple[tuple, dict]:
        """Enter a call of the model or of a submodule, with its `input_caster`.

        Returns the cast arguments.  `enclosing`: the swap of an outer forward of the same model, if
        this call is nested in one.
        """
        state, swapper = self._state, self.swapper
        casts = None
        if input_caster is not None:
            casts = InputCasts()
            args, kwargs = input_caster.cast(args, kwargs, casts)
        # Read it after the inputs are cast: an input that stays FP32 gives the model the policy for
        # mixed dtypes, and so may `swap_in`.
        policy = self.policy
        has_casts = casts is not None and (casts.tensors or casts.containers)
        if not (has_casts or swapper or policy or state.process_policy or thread_calls.stack):
            return args, kwargs
        state.enter(call, self)
        call.input_casts = casts
        call.compute_dtype = None if self._submodule_calls is None else self.in_dtype
        if swapper is not None and enclosing is None and not is_fx_traced(args, kwargs):
            swapper.swap_in(call, module)
            policy = self.policy
            if (
                input_caster is self._input_caster
                and call.swap is not None
                and self._submodule_calls is not None
            ):
                call.suspended_frames = self._submodule_calls.frames  # a call of the model itself
                call.suspended_frames.suspend()
        if policy is None and swapper is not None and state.half_model_policy is not None:
            policy = state.half_model_policy.with_half_dtype(swapper.dtype)
        if len(thread_calls.stack) > 1:
            if swapper is not None and not self._has_warned_of_user_block:
                self._warn_of_user_block()
            state.set_policy(call, *state.policy_arguments(policy))
        elif policy is not state.process_policy:
            state.set_policy(call, policy)
        if policy is not None:
            policy.cache.open(call, self._weight_usage)
            if policy.devices is not None:
                self._record_device(policy.devices)
        return args, kwargs

    def exit(self, call: Call) -> None:
        """Exit a call: copy its in-place changes of cast inputs back to the caller's objects."""
        if self._state.threads_in_function_modes and is_torch_function_mode_enabled():
            with without_torch_function_modes():
                return self.exit(call)
        if call.owner is not None:  # otherwise the call is not on the stack
            self._state.exit(call)
        forward_copies, casts = call.opened_forward_copies, call.input_casts
        if forward_copies is not None and forward_copies.usage is not None:
            forward_copies.usage.record(forward_copies.used_weights)
        if casts is not None:
            call.input_casts = None
            casts.write_changes_back()

    def convert_output(self, output: Any) -> Any:
        """The model's outputs, in the dtype that the code around the call wants."""
        if self._state.threads_in_function_modes and is_torch_function_mode_enabled():
            with without_torch_function_modes():
                return self.convert_output(output)
        dtype = self.out_dtype
        if thread_calls.stack and self.properties.cast_model_outputs is None:
            dtype = current_compute_dtype() or dtype
        return output if dtype is None else cast_tensors(output, dtype)

    def on_error(self, error: BaseException) -> None:
        """Add a note to an error about dtypes: which tensors are half, and why."""
        dtype_errors.explain(error, self._why_half(), self._remedy(), self.held_functions.name_of)

    def run_traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Run the whole call while Dynamo traces."""
        enclosing = (
            enclosing_swap(module) if thread_calls.stack and self.swapper is not None else None
        )
        if enclosing is not None and enclosing.swapper is not self.swapper:
            return forward(module, *args, **kwargs)
        output = self.run_traced_with_input_caster(
            self._input_caster, forward, module, args, kwargs
        )
        return output if self.out_dtype is None else cast_tensors(output, self.out_dtype)

    def run_traced_with_input_caster(
        self,
        input_caster: InputCaster | None,
        forward: Callable,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Like `enter_with_input_caster`, then the forward and the exit.

        Sets as few attributes as possible: strict export warns about every attribute set.
        """
        state, policy = self._state, self.policy
        sets_policy = True
        slots = None
        if input_caster is not None:
            args, kwargs = input_caster.cast(args, kwargs, None)
        if self.swapper is not None and not is_fx_traced(args, kwargs):
            slots = self.swapper.swap_in_traced(module)
        if policy is None and self.swapper is not None and state.half_model_policy is not None:
            policy = state.half_model_policy.with_half_dtype(self.swapper.dtype)
        if thread_calls.stack:
            policy, _, sets_policy = state.policy_arguments(policy)
        if slots is None and (policy is INHERIT or policy is state.current_policy()):
            return forward(module, *args, **kwargs)
        call = Call()
        call.is_dynamo_traced = True
        try:
            state.enter(call, self)
            call.traced_swap = slots
            call.compute_dtype = None if self._submodule_calls is None else self.in_dtype
            state.set_policy(call, policy, (), sets_policy)
            return forward(module, *args, **kwargs)
        finally:
            state.exit(call)

    def warn_of_lost_frame(self, trained: Iterable[Tensor]) -> None:
        """Warn once that the model is no longer cast, if its own frame is no longer called.

        Called when a `scale_loss` block begins and `model.forward` is no longer the frame.
        `trained`: the parameters of the block's optimizers.  If the new `forward` calls the frame,
        `_was_called` is set and nothing is logged.
        """
        if set(map(id, trained)).isdisjoint(map(id, self.model.parameters())):
            return
        if self._was_called or self._has_warned_of_lost_frame:
            self._was_called = False
            return
        self._has_warned_of_lost_frame = True
        logger.warning(
            "%s.forward was replaced or deleted after ampatch.initialize, and the one it has now "
            "does not call the earlier one: the model is no longer cast. Replace it, or take "
            "the hooks of a library out, before initialize; or call the earlier model.forward.",
            type(self.model).__name__,
        )

    def _warn_of_user_block(self) -> None:
        """Warn once that `disable_casts` and `precision` do not change half weights."""
        if not any(call.kind == USER_BLOCK for call in thread_calls.stack):
            return
        self._has_warned_of_user_block = True
        logger.warning(
            "%s is called inside ampatch.disable_casts() or ampatch.precision(). These blocks "
            "change only the casts of function calls; at %s the model's weights and inputs are "
            "half, so the block has no effect. For a forward in FP32: ampatch.unwrap(model)(...). "
            'For submodules in FP32: overrides={"name.of.the.module": "float"}.',
            type(self.model).__name__,
            self.properties.opt_level,
        )

    @contextlib.contextmanager
    def in_framework_step(self) -> Iterator[None]:
        """Context manager for a framework's step, which calls submodules outside of forwards.

        Does nothing for a model that is not half.
        """
        if self._submodule_calls is None:
            yield
            return
        call = Call()
        try:
            self._state.enter(call, self)
            call.step_output_dtype = self.out_dtype
            yield
        finally:
            self._state.exit_out_of_order(call)

    def _why_half(self) -> str:
        name, level = type(self.model).__name__, self.properties.opt_level
        if self.policy is not None:
            return f"{name} is at {level}, whose casts make the listed calls' results half"
        return f"{name} is at {level}, with weights and inputs in {self.properties.cast_model_type}"

    def _remedy(self) -> str:
        if self.policy is not None:
            return (
                "run the call that produced the half tensor in FP32: see `overrides=` of "
                'ampatch.initialize and ampatch.precision("float").'
            )
        return (
            'keep the module in FP32: overrides={"name.of.the.module": "float"} of '
            "ampatch.initialize; or use O1, which runs operators without a half kernel in FP32."
        )

    def _record_device(self, devices: set[str]) -> None:
        """Add the device of the model, which may have moved since the last call, to `devices`."""
        parameter = next(self.model.parameters(), None)
        if parameter is not None:
            devices.add(parameter.device.type)
