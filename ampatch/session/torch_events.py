"""What replaced tools of torch tell the open sessions, and ask them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import AmpatchError
from ..scaling.optimizers.state import fit_state

if TYPE_CHECKING:
    from .registry import Registry


class TorchEvents:
    """Events and questions that concern the models and optimizers of all open sessions."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    # Models

    def model_with(self, module: nn.Module) -> nn.Module | None:
        """The managed model that shares parameters or buffers with a module, or None."""
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for managed in self._registry.models():
            tensors = (*managed.model.parameters(), *managed.model.buffers())
            if not own.isdisjoint(map(id, tensors)):
                return managed.model
        return None

    def is_lent(self, parameter: Tensor) -> bool:
        """Whether forwards of a managed model have a half copy of this weight."""
        return any(managed.lends(parameter) for managed in self._registry.models())

    def give_back_shared(self, model: nn.Module) -> None:
        """A model is to lend its weights: those that others have made half are FP32 again."""
        own = set(map(id, model.parameters()))
        given: set[int] = set()
        for managed in self._registry.models():
            if managed.conversions.entries:
                given |= managed.give_back(own)
        for optimizer in self._registry.optimizers() if given else ():
            fit_state(optimizer.optimizer, given)

    @contextlib.contextmanager
    def being_sharded(
        self, modules: list[nn.Module], policy: Any, ignored: set[Tensor]
    ) -> Iterator[Any]:
        """Context manager: `fully_shard` replaces parameters of modules; gives its policy."""
        unchanged = set(map(id, ignored))
        gone = {id(weight) for module in modules for weight in module.parameters()} - unchanged
        self._refuse_optimizers_of(gone, modules)
        with contextlib.ExitStack() as stack:
            for managed in self._registry.models():
                if not set(managed.model.modules()).isdisjoint(modules):
                    part = managed.being_sharded(modules, policy, unchanged)
                    policy = stack.enter_context(part)
            yield policy

    def _refuse_optimizers_of(self, gone: set[int], modules: list[nn.Module]) -> None:
        for managed in self._registry.optimizers():
            held = (one for group in managed.optimizer.param_groups for one in group["params"])
            if any(id(one) in gone and not hasattr(one, "placements") for one in held):
                raise AmpatchError(
                    f"torch.distributed.fsdp.fully_shard({type(modules[0]).__name__}): it replaces "
                    f"parameters that {type(managed.optimizer).__name__} holds, which ampatch "
                    "manages, so that optimizer would train nothing. Nothing was changed. Call "
                    "fully_shard first, then make the optimizer of model.parameters(), then call "
                    "ampatch.initialize(model, optimizer), or ampatch.add_optimizers(optimizer) "
                    "if the model was initialized before."
                )

    # Gradients and loss scales

    def ready_gradients(self, tensors: list[Tensor]) -> None:
        """Gradients of these tensors are about to be used: unscale them."""
        wanted = {id(tensor) for tensor in tensors}
        for managed in self._registry.optimizers():
            managed.gradients.ready(wanted)

    def forget_overflow(self, zeroed: set[int]) -> None:
        """The gradients of these parameters (ids) were zeroed by their module."""
        for managed in self._registry.optimizers():
            managed.gradients.zeroed_by_others(zeroed)

    # Weights that O1 has cached casts of

    def note_data_access(self, parameter: Tensor) -> None:
        """`parameter.data` was read, and may be written into unseen, or was replaced."""
        for session in self._registry.sessions:
            session.policies.cache.forget(parameter)

    def forget_copies(self) -> None:
        """An optimizer has stepped: cast weights anew.  Fused steps raise no versions."""
        for session in self._registry.sessions:
            session.policies.cache.forget_all()
