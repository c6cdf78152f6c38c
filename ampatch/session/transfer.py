"""Moves models and optimizers from earlier sessions to a new one, and back if that fails."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ..models.managed_model import ManagedModel
from ..scaling.master_weights import Pair
from ..scaling.optimizer import ManagedOptimizer

if TYPE_CHECKING:
    from .registry import Registry
    from .session import Session


class _Optimizer(NamedTuple):
    """What an optimizer of an earlier session had."""

    managed: ManagedOptimizer
    masters: list[tuple[Pair, Tensor | None]]  # with the masters' gradients


class _Earlier(NamedTuple):
    """A session that some models and optimizers are taken from."""

    session: Session
    models: list[ManagedModel]
    optimizers: list[_Optimizer]
    unmanaged: list[Any]


class Transfer:
    """Context manager: releases models and optimizers from the sessions that have them.

    On an exception these sessions get them back, with the very master weights and gradients they
    had, so that training goes on as if nothing had been tried.  `trained` has the ids of the
    parameters that are in optimizers of these sessions.
    """

    def __init__(self, registry: Registry, models: list[nn.Module], optimizers: list[Any]) -> None:
        self._models = [(registry.models.session_of(model), model) for model in models]
        self._optimizers = [(registry.optimizers.session_of(one), one) for one in optimizers]
        self._earlier: list[_Earlier] = []
        self.trained: set[int] = set()

    def __enter__(self) -> Transfer:
        found = (session for session, _ in (*self._models, *self._optimizers))
        asked = {id(session): session for session in found if session is not None}.values()
        for session in asked:
            for managed in session.optimizers.alive():
                managed.bring_up_to_date()
                self.trained.update(map(id, managed.groups.own_parameters()))
        self._earlier = [_remember(session) for session in asked]
        try:
            for holder, model in self._models:
                if holder is not None:
                    holder.release_model(model)
            for holder, optimizer in self._optimizers:
                if holder is not None:
                    holder.release_optimizer(optimizer)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._restore()

    def _restore(self) -> None:
        for earlier in self._earlier:
            known = {
                id(pair.half): pair.master
                for optimizer in earlier.optimizers
                for pair, _ in optimizer.masters
            }
            earlier.session.restore(
                earlier.models,
                [optimizer.managed for optimizer in earlier.optimizers],
                earlier.unmanaged,
                known,
            )
            for optimizer in earlier.optimizers:
                for pair, grad in optimizer.masters:
                    pair.half.grad, pair.master.grad = None, grad


def _remember(session: Session) -> _Earlier:
    return _Earlier(
        session,
        session.models.alive(),
        [
            _Optimizer(managed, [(pair, pair.master.grad) for pair in managed.masters])
            for managed in session.optimizers.alive()
        ],
        session.optimizers.alive_unmanaged(),
    )
