"""Models and optimizers on their way from earlier sessions to a new one, and back if it fails."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from .managed_model import ManagedModel
from .scaling.master_weights import Pair
from .scaling.optimizer import ManagedOptimizer

if TYPE_CHECKING:
    from .session import Session


class _Optimizer(NamedTuple):
    """What an optimizer of an earlier session had."""

    managed: ManagedOptimizer
    masters: list[tuple[Pair, Tensor | None]]  # with the masters' gradients


class _Earlier(NamedTuple):
    """A session that is asked for some of its members."""

    session: Session
    models: list[ManagedModel]
    optimizers: list[_Optimizer]
    bystanders: list[weakref.ref]


class Handover:
    """Context manager: takes members out of `sessions`; on an exception they go back.

    Back under management with the very master weights and gradients they had,
    so that training goes on as if nothing had been tried.
    """

    def __init__(
        self, sessions: list[Session], models: list[nn.Module], optimizers: list[Any]
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._optimizers = optimizers
        self._earlier: list[_Earlier] = []

    def __enter__(self) -> None:
        asked = [session for session in self._sessions if self._asks(session)]
        for session in asked:
            for managed in session.optimizers():
                managed.settle()
        self._earlier = [_remember(session) for session in asked]
        try:
            for session in asked:
                for model in self._models:
                    session.release_model(model)
                for optimizer in self._optimizers:
                    session.release_optimizer(optimizer)
        except BaseException:
            self._give_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._give_back()

    def _asks(self, session: Session) -> bool:
        return any(session.manages(model) for model in self._models) or any(
            session.knows(optimizer) for optimizer in self._optimizers
        )

    def _give_back(self) -> None:
        for earlier in self._earlier:
            known = {
                id(pair.half): pair.master
                for optimizer in earlier.optimizers
                for pair, _ in optimizer.masters
            }
            earlier.session.take_back(
                earlier.models,
                [optimizer.managed for optimizer in earlier.optimizers],
                earlier.bystanders,
                known,
            )
            for optimizer in earlier.optimizers:
                for pair, grad in optimizer.masters:
                    pair.half.grad, pair.master.grad = None, grad


def _remember(session: Session) -> _Earlier:
    return _Earlier(
        session,
        list(session.models()),
        [
            _Optimizer(managed, [(pair, pair.master.grad) for pair in managed.masters])
            for managed in session.optimizers()
        ],
        list(session.bystanders),
    )
