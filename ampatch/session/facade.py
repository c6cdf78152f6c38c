"""The names of the engine that the packages above the public API use, besides `ampatch` itself.

`auto`, `cli`, `compat`, `diagnose`, `integrations`, `launch`, `sweep` and `tune` import `ampatch`,
this module, `native`, the leaves (`errors`, `log`, `torch_private`), the settings in `config`, and
`casting.tables` as data (`tests/laws/test_layers.py` holds the list).  So the engine can be
rearranged behind these names.  They are not a public API and may change without notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..casting.autocast_interop import ignore_region
from ..casting.cast_observers import CastObserver, observers
from ..casting.outermost_forwards import OutermostForwards
from ..casting.patches import PatchSet
from ..casting.places import exists, raw_attribute
from ..casting.places import resolve as resolve_namespace
from ..config.opt_levels import Properties
from ..models.values import map_tensors, tensors_within
from ..scaling import delayed
from ..scaling.loss_scaler import Scaler, make_scaler
from ..scaling.optimizer import ManagedOptimizer, checkpoint_readers
from ..scaling.optimizers.closures import evaluates_closure_first
from ..scaling.scaler_entries import load_entries
from .session import Session, registry

__all__ = [
    "ManagedOptimizer",
    "OutermostForwards",
    "PatchSet",
    "Scaler",
    "Session",
    "checkpoint_readers",
    "drop_pending_updates",
    "edit_tables",
    "evaluates_closure_first",
    "ignore_region",
    "in_framework_step",
    "listed_function",
    "load_entries",
    "make_scaler",
    "manage_optimizer",
    "map_tensors",
    "observe_casts",
    "open_automatic_session",
    "open_sessions",
    "release_model",
    "replacement_of",
    "scaling_or_newest_sessions",
    "session_of",
    "stop_observing_casts",
    "tensors_within",
    "with_apex_tables",
]

session_of = registry.objects.session_of
edit_tables = registry.edit_tables
replacement_of = registry.installation.replacements.replacement_of


# Sessions and models


def open_sessions() -> list[Session]:
    """The open sessions, the newest last."""
    return list(registry.sessions)


def scaling_or_newest_sessions() -> list[Session]:
    """The sessions that have optimizers, newest last, or, if there are none, the newest session."""
    return registry.scaling_sessions() or registry.sessions[-1:]


def open_automatic_session(properties: Properties) -> tuple[Session, OutermostForwards]:
    """Open a session without models, for a script that writes no `scale_loss`.

    Returns `(session, outermost_forwards)`.  The caller scales each backward pass with
    `session.scale_loss_block`, and replaces `nn.Module.__call__` with
    `outermost_forwards.around(nn.Module.__call__)`.  Calls are cast on accelerators, and on the
    devices of optimizers that `manage_optimizer` adds.
    """
    session = Session(properties)
    session.scales_automatically = True
    session.outermost_forwards = OutermostForwards(session.policies.tables_policy, registry.state)
    session.open([], [])
    session.policies.cast_on_accelerators()
    registry.refresh()
    return session, session.outermost_forwards


@contextlib.contextmanager
def with_apex_tables() -> Iterator[None]:
    """Context manager: sessions that open inside it follow apex's tables."""
    registry.opens_with_apex_tables = True
    try:
        yield
    finally:
        registry.opens_with_apex_tables = False


def release_model(model: nn.Module) -> None:
    """Remove a model from its session, if it has one, as `initialize` does for a new session."""
    session = registry.objects.session_of(model)
    if session is not None:
        session.release(model)
        registry.close_empty()


def in_framework_step(model: nn.Module) -> AbstractContextManager[None]:
    """Context manager around a framework's step: a method of a managed model, not its forward.

    At O2 and O3 the code of the step is outside the model: submodules that the step calls get half
    inputs and return FP32.
    """
    managed = registry.objects.managed(model)
    return contextlib.nullcontext() if managed is None else managed.in_framework_step()


# Optimizers


def manage_optimizer(session: Session, optimizer: Any) -> ManagedOptimizer:
    """Add an optimizer to an open session, and cast on the devices of its parameters."""
    managed = session.manage_optimizer(optimizer)
    session.policies.cast_on({parameter.device.type for parameter in managed.parameters()})
    return managed


def drop_pending_updates(session: Session, scaler: Scaler) -> None:
    """Drop updates of `scaler` that wait for a step of the session's optimizers."""
    delayed.drop_pending_updates(scaler, [optimizer.gradients for optimizer in session.optimizers])


# Casting


def observe_casts(observer: CastObserver) -> None:
    """Notify `observer` of each patched call and cast, in all threads, from now on."""
    observers.append(observer)
    # Patched functions then read their thread's policy and notify observers.
    registry.state.acquire_thread_policies(observer)


def stop_observing_casts(observer: CastObserver) -> None:
    """Undo `observe_casts`.  A second call does nothing."""
    if observer in observers:
        observers.remove(observer)
        registry.state.release_thread_policies(observer)


def listed_function(where: str, name: str) -> Any:
    """Return the attribute `name` of the op tables' namespace `where`, or None if torch lacks it.

    A static method is returned as such, not as the function inside.
    """
    return raw_attribute(resolve_namespace(where), name) if exists(where, name) else None
