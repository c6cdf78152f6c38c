"""What replaced tools of torch report to the open sessions, and what they ask them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from ..casting import weight_cache
from ..casting.calls import CastState, here
from ..models.lent_weights import note_values, parameter_behind
from ..models.managed_model import ManagedModel
from ..scaling.gradients import skip_together
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.optimizers.state import fit_state


class Members(Protocol):
    """The open sessions, and all that they manage."""

    state: CastState
    sessions: list[Any]

    def models(self) -> list[ManagedModel]: ...

    def optimizers(self) -> list[ManagedOptimizer]: ...


class TorchEvents:
    """Events and questions that concern the models and optimizers of all open sessions."""

    def __init__(self, members: Members) -> None:
        self._members = members

    # Models

    def model_with(self, module: nn.Module) -> nn.Module | None:
        """The managed model that shares parameters or buffers with a module, or None."""
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for managed in self._members.models():
            tensors = (*managed.model.parameters(), *managed.model.buffers())
            if not own.isdisjoint(map(id, tensors)):
                return managed.model
        return None

    def is_relied_on(self, tensor: Tensor) -> bool:
        """Whether a managed model came with this parameter or buffer, or an optimizer has it."""
        if parameter_behind(tensor) is not None:  # within the forward
            return True
        return any(managed.came_with(tensor) for managed in self._members.models()) or any(
            param is tensor for one in self._members.optimizers() for param in one.parameters()
        )

    def sessions_of(self, module: nn.Module) -> list[Any]:
        """The enabled sessions that manage weights of a module, or that have no models."""
        own = set(map(id, module.parameters()))
        enabled = [one for one in self._members.sessions if one.properties.enabled]
        return [
            session
            for session in enabled
            if not session.model_rows
            or any(not own.isdisjoint(map(id, one.model.parameters())) for one in session.models)
        ]

    def is_lent(self, parameter: Tensor) -> bool:
        """Whether forwards of a managed model have a half copy of this weight."""
        return any(managed.lends(parameter) for managed in self._members.models())

    def give_back_shared(self, model: nn.Module) -> None:
        """A model is to lend its weights: those that others have made half are FP32 again."""
        own = set(map(id, model.parameters()))
        given: set[int] = set()
        for managed in self._members.models():
            if managed.conversions.entries:
                given |= managed.give_back(own)
        for optimizer in self._members.optimizers() if given else ():
            fit_state(optimizer.optimizer, given)

    def has_loaded(self, module: nn.Module) -> None:
        """`module.load_state_dict` has loaded values."""
        for managed in self._members.models():
            if managed.statistics is not None:
                managed.statistics.loaded(module)

    def note_request(self, tensors: list[Tensor]) -> bool:
        """Gradients of these tensors are asked for: see `LastForward.note_request`."""
        if here.stack:
            behind = map(parameter_behind, tensors)
            tensors = tensors + [weight for weight in behind if weight is not None]
        wanted, may_share = set(map(id, tensors)), False
        for managed in self._members.models():
            may_share |= managed.note_request(wanted)
        return may_share

    # Gradients and loss scales

    def ready_gradients(self, tensors: list[Tensor], by_norm: bool) -> None:
        """Gradients of these tensors are about to be used, `by_norm` all together: unscale them."""
        wanted = {id(tensor) for tensor in tensors}
        ready = [one.gradients for one in self._members.optimizers()]
        clipped = [one for one in ready if one.ready(wanted)]
        if by_norm:
            skip_together(clipped)

    def forget_overflow(self, zeroed: set[int]) -> None:
        """The gradients of these parameters (ids) were zeroed by their module."""
        for managed in self._members.optimizers():
            managed.gradients.zeroed_by_others(zeroed)

    # Weights and their half copies

    def note_data_access(self, tensor: Tensor) -> None:
        """`tensor.data` is about to be read, and may be written into unseen, or to be replaced."""
        if isinstance(tensor, nn.Parameter):
            weight_cache.forget(tensor)
        elif here.stack:
            note_values(tensor)
