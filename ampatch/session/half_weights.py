"""Half parameters and their masters, found in all open sessions.

The replaced tools of torch ask here, since they know tensors and modules but no session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..errors import AmpatchError
from ..torch_private.dtensors import local_of

if TYPE_CHECKING:
    from ..scaling.masters.half_gradients import HalfGradients
    from ..scaling.optimizer import ManagedOptimizer
    from .session import Session


class Sessions(Protocol):
    """Has the open sessions, the newest last."""

    sessions: list[Session]


class HalfWeights:
    """Questions about the weights of all open sessions, and events that concern them."""

    def __init__(self, registry: Sessions) -> None:
        self._registry = registry

    def _optimizers(self) -> list[ManagedOptimizer]:
        return [
            managed for session in self._registry.sessions for managed in session.optimizers.alive()
        ]

    # Questions

    def current_master_of(self, half: Tensor) -> Tensor | None:
        """The FP32 master of a half parameter, up to date, or None."""
        for session in reversed(self._registry.sessions):
            master = session.masters.current(half)
            if master is not None:
                return master
        return None

    def half_of(self, master: Tensor) -> Tensor | None:
        """The half parameter of a master, or None."""
        for managed in self._optimizers():
            half = managed.masters.half_of(master)
            if half is not None:
                return half
        return None

    def masters_in(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """The half parameters of a module that have masters, with these, up to date."""
        pairs = [(half, self.current_master_of(half)) for half in module.parameters()]
        return [(half, master) for half, master in pairs if master is not None]

    def model_with(self, module: nn.Module) -> nn.Module | None:
        """The managed model that shares parameters or buffers with a module, or None."""
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for session in self._registry.sessions:
            for managed in session.models.alive():
                tensors = (*managed.model.parameters(), *managed.model.buffers())
                if not own.isdisjoint(map(id, tensors)):
                    return managed.model
        return None

    def name_of(self, tensor: Tensor) -> tuple[str, bool] | None:
        """The name of the managed half parameter that a tensor is, or shares memory with.

        With it comes whether the parameter has a master.  None for another tensor.
        """
        place = local_of(tensor).data_ptr()
        for session in self._registry.sessions:
            for managed in session.models.alive():
                for name, parameter in managed.model.named_parameters():
                    own = local_of(parameter)
                    if parameter.dtype is tensor.dtype and own.data_ptr() == place:
                        has_master = session.masters.of(parameter) is not None
                        return f"{type(managed.model).__name__}.{name}", has_master
        return None

    def that_need_masters(self) -> set[int]:
        """Ids of the half parameters of models at a level with master weights."""
        sessions = self._registry.sessions
        return set().union(*(session.weights.halves_that_need_masters() for session in sessions))

    def keepers(self, parameters: Sequence[Tensor]) -> list[list[HalfGradients]]:
        """What keeps the FP32 gradients of each parameter: of half weights with masters."""
        optimizers = [managed for managed in self._optimizers() if managed.masters.by_half]
        return [
            [
                managed.gradients.in_halves
                for managed in optimizers
                if id(parameter) in managed.masters.by_half
            ]
            for parameter in parameters
        ]

    # Events

    def ready_gradients(self, tensors: list[Tensor]) -> None:
        """Gradients of these tensors are about to be used: complete and unscale them."""
        wanted = {id(tensor) for tensor in tensors}
        for managed in self._optimizers():
            managed.gradients.ready(wanted)

    def forget_overflow(self, zeroed: set[int]) -> None:
        """The gradients of these parameters (ids) were zeroed by their module."""
        for managed in self._optimizers():
            managed.gradients.zeroed_by_model(zeroed)

    def broadcast_masters(
        self, parameters: Sequence[Tensor], send: Callable[[Tensor], None]
    ) -> None:
        """Have `send` make the masters of these parameters, and to be, equal on all ranks."""
        for session in self._registry.sessions:
            session.waiting.broadcast(parameters, send)
        for managed in self._optimizers():
            for parameter in parameters:
                if managed.masters.of(parameter) is not None:
                    managed.masters.broadcast(parameter, send)

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
                f"DistributedDataParallel({type(model).__name__}).join(): "
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

    @contextlib.contextmanager
    def as_plain(self, halves: set[int]) -> Iterator[None]:
        """Context manager: these half weights (ids) are of the class that torch gave them."""
        with contextlib.ExitStack() as stack:
            for managed in self._optimizers() if halves else ():
                stack.enter_context(managed.masters.as_plain(halves))
            yield

    def optimizer_of(self, module: nn.Module) -> Any | None:
        """A managed optimizer that has a parameter of this module, or its master; or None."""
        own = set(map(id, module.parameters()))
        for managed in self._optimizers():
            if not own.isdisjoint(map(id, managed.groups.own_parameters())):
                return managed.optimizer
        return None

    @contextlib.contextmanager
    def as_float(self, module: nn.Module) -> Iterator[None]:
        """Context manager: the weights of a managed model, or of a part of one, are FP32.

        Those that stand there at the end are converted again.
        """
        with contextlib.ExitStack() as stack:
            for session in self._registry.sessions:
                for managed in session.models.alive():
                    if module in set(managed.model.modules()):
                        stack.callback(session.weights.forget_originals)
                        stack.callback(session.waiting.wait)
                        stack.enter_context(managed.as_float(module))
            yield

    @contextlib.contextmanager
    def being_sharded(
        self, modules: list[nn.Module], policy: Any, ignored: set[Tensor]
    ) -> Iterator[Any]:
        """Context manager: `fully_shard` replaces parameters of modules; gives its policy."""
        unchanged = set(map(id, ignored))
        gone = {id(weight) for module in modules for weight in module.parameters()} - unchanged
        self._refuse_optimizers_of(gone, modules)
        with contextlib.ExitStack() as stack:
            for session in self._registry.sessions:
                for managed in session.models.alive():
                    if not set(managed.model.modules()).isdisjoint(modules):
                        part = managed.being_sharded(modules, policy, unchanged)
                        policy = stack.enter_context(part)
            yield policy
        for session in self._registry.sessions:
            session.waiting.leave(gone)

    def _refuse_optimizers_of(self, gone: set[int], modules: list[nn.Module]) -> None:
        for managed in self._optimizers():
            own = managed.groups.own_parameters()
            if any(id(one) in gone and not hasattr(one, "placements") for one in own):
                raise AmpatchError(
                    f"torch.distributed.fsdp.fully_shard({type(modules[0]).__name__}): it replaces "
                    f"parameters that {type(managed.optimizer).__name__} holds, which ampatch "
                    "manages, so that optimizer would train nothing. Nothing was changed. Call "
                    "fully_shard first, then make the optimizer of model.parameters(), then call "
                    "ampatch.initialize(model, optimizer), or ampatch.add_optimizers(optimizer) "
                    "if the model was initialized before."
                )

    # Writes that raise no version, and half copies of FP32 weights

    def note_data_access(self, parameter: Tensor, data: Tensor | None) -> None:
        """`parameter.data` was read, and may be written into unseen, or (None) was replaced."""
        for session in self._registry.sessions:
            session.policies.cache.forget(parameter)
            for managed in session.optimizers.alive():
                managed.masters.touched(parameter, data)

    def note_hook(self) -> None:
        """A hook was put on a tensor of the graph that this thread is building."""
        for session in self._registry.sessions:
            session.policies.cache.note_hook()

    def forget_copies(self) -> None:
        """An optimizer has stepped: cast weights anew.  Fused steps raise no versions."""
        for session in self._registry.sessions:
            session.policies.cache.forget_all()
