"""What replaced tools of torch tell the open sessions, and ask them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..errors import AmpatchError
from ..scaling.optimizers.state import fit_state

if TYPE_CHECKING:
    from ..models.managed_model import ManagedModel
    from ..scaling.optimizer import ManagedOptimizer
    from .session import Session


class Sessions(Protocol):
    """Has the open sessions, the newest last."""

    sessions: list[Session]


class TorchEvents:
    """Events and questions that concern the models and optimizers of all open sessions."""

    def __init__(self, registry: Sessions) -> None:
        self._registry = registry

    def _optimizers(self) -> list[ManagedOptimizer]:
        return [
            managed for session in self._registry.sessions for managed in session.optimizers.alive()
        ]

    def _models(self) -> list[ManagedModel]:
        return [
            managed for session in self._registry.sessions for managed in session.models.alive()
        ]

    # Models

    def model_with(self, module: nn.Module) -> nn.Module | None:
        """The managed model that shares parameters or buffers with a module, or None."""
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for managed in self._models():
            tensors = (*managed.model.parameters(), *managed.model.buffers())
            if not own.isdisjoint(map(id, tensors)):
                return managed.model
        return None

    def is_lent(self, parameter: Tensor) -> bool:
        """Whether forwards of a managed model have a half copy of this weight."""
        return any(managed.lends(parameter) for managed in self._models())

    def give_back_shared(self, model: nn.Module) -> None:
        """A model is to lend its weights: those that others have made half are FP32 again."""
        own = set(map(id, model.parameters()))
        given: set[int] = set()
        for managed in self._models():
            if managed.conversions.entries:
                given |= managed.give_back(own)
        for optimizer in self._optimizers() if given else ():
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
            for managed in self._models():
                if not set(managed.model.modules()).isdisjoint(modules):
                    part = managed.being_sharded(modules, policy, unchanged)
                    policy = stack.enter_context(part)
            yield policy

    def _refuse_optimizers_of(self, gone: set[int], modules: list[nn.Module]) -> None:
        for managed in self._optimizers():
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
        for managed in self._optimizers():
            managed.gradients.ready(wanted)

    def forget_overflow(self, zeroed: set[int]) -> None:
        """The gradients of these parameters (ids) were zeroed by their module."""
        for managed in self._optimizers():
            managed.gradients.zeroed_by_model(zeroed)

    def broadcast_scales(self, model: nn.Module, send: Callable[[list], None]) -> None:
        """Have `send` make the states of loss scalers equal, of sessions with parts of `model`."""
        for session in self._sessions_of(model):
            states = [scaler.state_dict() for scaler in session.scalers]
            send(states)
            for scaler, state in zip(session.scalers, states, strict=True):
                scaler.load_state_dict(state)

    def refuse_uneven(self, model: nn.Module) -> None:
        """Raise `AmpatchError` for a model whose ranks share a flag, which `join` cannot shadow."""
        if any(session.process_group is not None for session in self._sessions_of(model)):
            raise AmpatchError(
                f"{type(model).__name__}.join(): "
                "ampatch.initialize(process_group=...) has the ranks share a flag in each block, "
                "for which a rank without data would not be there. Leave process_group out: "
                "DistributedDataParallel shows each rank the overflows of the others."
            )

    def _sessions_of(self, model: nn.Module) -> list[Session]:
        parts = set(map(id, model.modules()))
        return [
            session
            for session in self._registry.sessions
            if any(id(managed.model) in parts for managed in session.models.alive())
        ]

    # Weights that O1 has cached casts of

    def note_data_access(self, parameter: Tensor) -> None:
        """`parameter.data` was read, and may be written into unseen, or was replaced."""
        for session in self._registry.sessions:
            session.policies.cache.forget(parameter)

    def note_hook(self) -> None:
        """A hook was put on a tensor of the graph that this thread is building."""
        for session in self._registry.sessions:
            session.policies.cache.note_hook()

    def forget_copies(self) -> None:
        """An optimizer has stepped: cast weights anew.  Fused steps raise no versions."""
        for session in self._registry.sessions:
            session.policies.cache.forget_all()
