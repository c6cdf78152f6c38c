"""torch's own tools that are replaced while a session is open, and what they need of the sessions.

They are replaced at every level.  In disabled sessions, the replacements call the originals.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from ..casting import autocast_kernels, context_propagation, weight_cache
from ..casting.calls import CastState, thread_calls
from ..casting.handlers import FunctionModes
from ..casting.patches import Patch, PatchSet
from ..casting.places import bind_originals, rebind
from ..interop import (
    backward_passes,
    clip_grad,
    data_loading,
    ddp,
    module_dtype,
    tensor_methods,
    torchscript,
)
from ..models import own_frame
from ..models.half_copy_swaps import parameter_of_copy, record_values
from ..models.managed_model import ManagedModel
from ..scaling.delayed import skip_together, unscale_before_clipping
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.scale_loss_block import start_pass_check
from ..torch_private import dynamo
from ..torch_private.optimizers import notify_of_steps
from . import ranks


class RegistryForTools(Protocol):
    """The part of the registry that the replacements use."""

    state: CastState

    def models(self) -> list[ManagedModel]: ...

    def optimizers(self) -> list[ManagedOptimizer]: ...

    def sessions_of(self, module: nn.Module) -> list[Any]: ...

    def has_half_copy(self, parameter: Tensor) -> bool: ...


class TorchTools:
    """Replaces the tools when the first session opens, before the tables are installed."""

    def __init__(self, registry: RegistryForTools) -> None:
        self._registry = registry
        self._patches = PatchSet()
        self._pairs: list[tuple[Any, Any]] = []  # (replacement, original)
        self._is_waiting_for_dynamo = False

    def install(self) -> None:
        """Replace the tools.  A second call does nothing."""
        if len(self._patches):
            return
        self._patches.on_undo(notify_of_steps(weight_cache.drop_copies))
        FunctionModes(self._registry.state).watch(self._patches)
        if self._is_waiting_for_dynamo:
            self._replace([*self._all_patches(), *dynamo.gradient_reader_patches()])
        else:
            self._replace(self._all_patches())
            self._is_waiting_for_dynamo = True
            dynamo.when_imported(self._replace_in_dynamo)

    def uninstall(self) -> None:
        """Restore the tools.  A second call does nothing."""
        self._patches.undo()
        bind_originals(self._pairs)
        self._pairs = []

    def _replace_in_dynamo(self) -> None:
        if len(self._patches):
            self._replace(dynamo.gradient_reader_patches())

    def _replace(self, replacements: list[Patch]) -> None:
        """Apply patches, also to globals that were bound before.

        All in one search of the modules, which takes milliseconds.
        """
        new = []
        for owner, name, make in replacements:
            original = self._patches.replace(owner, name, make)
            new.append((vars(owner)[name], original))
        self._pairs += new
        rebind({id(original): (self._patches, put) for put, original in new})

    def _all_patches(self) -> list[Patch]:
        """The patches of all tools, each with its reason."""
        registry = self._registry
        state = registry.state
        return [
            # clipping needs unscaled gradients; zero_grad clears a found overflow
            *clip_grad.patches(self._unscale_before_clipping, self._forget_overflow),
            # wrapping compares settings and scales of all ranks
            *ddp.init_patches(
                lambda model, group: ranks.compare(registry.sessions_of(model), model, group),
                registry.has_half_copy,
            ),
            # Join is refused under a dynamic loss scale
            *ddp.join_patches(
                lambda model: ranks.refuse_uneven_inputs(registry.sessions_of(model), model)
            ),
            # writes through `.data` do not bump a tensor's version
            *tensor_methods.data_patches(_on_data_access),
            # TorchScript compiles the original forwards, and warns that it casts nothing
            *torchscript.patches(state),
            # recomputes and backwards have the forward's casts and half copies
            *context_propagation.checkpoint_patches(state),
            *context_propagation.function_patches(state),
            # weights in autograd.grad(...) and backward(inputs=...) get nodes of their own;
            # scale_loss blocks check the backward passes that run in them
            *backward_passes.patches(self._record_wanted_grads, start_pass_check),
            # operators with an autocast kernel run under torch's own autocast
            *autocast_kernels.patches(state),
            # replicas of DataParallel run under the policy of the call
            *context_propagation.replica_patches(state),
            # DataLoaders prepare data without casts
            *data_loading.patches(state),
            # copies, pickles and state dicts have the parameters, not their half copies
            *tensor_methods.copy_patches(),
            *tensor_methods.state_dict_patches(),
            # running statistics are recorded when they are loaded
            *tensor_methods.load_state_dict_patches(self._has_loaded),
            # copies, pickles and replicas of modules have frames of their own, or none
            *own_frame.copy_patches(),
            # module.to(dtype) is refused
            *module_dtype.patches(self._model_sharing_tensors, self._is_relied_on),
        ]

    def _model_sharing_tensors(self, module: nn.Module) -> nn.Module | None:
        """The managed model that shares parameters or buffers with a module, or None."""
        tensor_ids = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for managed in self._registry.models():
            tensors = (*managed.model.parameters(), *managed.model.buffers())
            if not tensor_ids.isdisjoint(map(id, tensors)):
                return managed.model
        return None

    def _is_relied_on(self, tensor: Tensor) -> bool:
        """Whether a managed model had this tensor at `initialize`, or an optimizer has it."""
        if parameter_of_copy(tensor) is not None:  # a half copy, during a forward
            return True
        return any(
            managed.had_at_session_start(tensor) for managed in self._registry.models()
        ) or any(
            param is tensor
            for optimizer in self._registry.optimizers()
            for param in optimizer.parameters()
        )

    def _record_wanted_grads(self, tensors: list[Tensor]) -> bool:
        """Record that the script asks for gradients of these tensors.

        See `WeightUsage.record_wanted_grads`.
        """
        if thread_calls.stack:
            weights = map(parameter_of_copy, tensors)
            tensors = tensors + [weight for weight in weights if weight is not None]
        wanted = set(map(id, tensors))
        may_share = False
        for managed in self._registry.models():
            may_share |= managed.record_wanted_grads(wanted)
        return may_share

    def _has_loaded(self, module: nn.Module) -> None:
        """Record the running statistics that `module.load_state_dict` has loaded."""
        for managed in self._registry.models():
            if managed.running_statistics is not None:
                managed.running_statistics.on_load(module)

    def _unscale_before_clipping(self, tensors: list[Tensor], by_norm: bool) -> None:
        """Unscale gradients of these tensors, which are about to be clipped.

        `by_norm`: whether one norm of all of them clips them.
        """
        param_ids = {id(tensor) for tensor in tensors}
        members = [optimizer.gradients for optimizer in self._registry.optimizers()]
        clipped = [member for member in members if unscale_before_clipping(member, param_ids)]
        if by_norm:
            skip_together(clipped)

    def _forget_overflow(self, zeroed: set[int]) -> None:
        """Clear the overflow of parameters (ids) whose module has zeroed their gradients."""
        for managed in self._registry.optimizers():
            managed.gradients.on_zeroed_elsewhere(zeroed)


def _on_data_access(tensor: Tensor) -> None:
    """Called before `tensor.data` is read or set: a write through it does not bump the version."""
    if isinstance(tensor, nn.Parameter):
        weight_cache.cast_at_each_use(tensor)
    elif thread_calls.stack:
        record_values(tensor)
