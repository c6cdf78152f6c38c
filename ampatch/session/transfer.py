"""Moves models and optimizers from earlier sessions to a new one, and back if that fails."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ..models.managed_model import ManagedModel
from ..scaling.optimizer import ManagedOptimizer

if TYPE_CHECKING:
    from .registry import Registry
    from .session import Session


class _Earlier(NamedTuple):
    """A session that some models and optimizers are taken from."""

    session: Session
    models: list[ManagedModel]
    optimizers: list[ManagedOptimizer]
    unmanaged: list[Any]


class Transfer:
    """Context manager: releases models and optimizers from the sessions that have them.

    On an exception these sessions get them back, so that training goes on as if nothing had been
    tried.
    """

    def __init__(self, registry: Registry, models: list[nn.Module], optimizers: list[Any]) -> None:
        self._models = [(registry.models.session_of(model), model) for model in models]
        self._optimizers = [(registry.optimizers.session_of(one), one) for one in optimizers]
        self._earlier: list[_Earlier] = []

    def __enter__(self) -> Transfer:
        found = (session for session, _ in (*self._models, *self._optimizers))
        asked = {id(session): session for session in found if session is not None}.values()
        self._earlier = [
            _Earlier(
                session,
                session.models.alive(),
                session.optimizers.alive(),
                session.optimizers.alive_unmanaged(),
            )
            for session in asked
        ]
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
        for session, models, optimizers, unmanaged in self._earlier:
            session.restore(models, optimizers, unmanaged)
