"""What the rooms above the public API use of the engine, besides `ampatch` itself.

`auto`, `cli`, `compat`, `diagnose`, `integrations`, `launch` and `sweep` import `ampatch`, this
module, the leaves `errors`, `log` and `_version`, the settings in `config`, and as data
`casting.tables`; nothing else.  So the engine can be rearranged behind these names.  They are no
public API: a script that imports this module has no promise that they stay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..casting.cast_observers import CastObserver, observers
from ..casting.patches import PatchSet
from ..casting.places import has, raw_attribute
from ..casting.places import resolve as resolve_place
from ..casting.tables import Rule
from ..config.opt_levels import Properties
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.optimizers.closures import torch_optimizers
from ..torch_private import foreach
from ..torch_private.devices import have_fused_optimizers
from ..torch_private.probes import current_backward_pass
from .registry import registry
from .session import Session

__all__ = [
    "ManagedOptimizer",
    "PatchSet",
    "Properties",
    "Session",
    "current_backward_pass",
    "drop_cached_weights",
    "edit_tables",
    "evaluates_closure_once",
    "foreach",
    "have_fused_optimizers",
    "in_step",
    "listed_function",
    "manage_optimizer",
    "managed_optimizer",
    "members_of",
    "open_automatic_session",
    "open_sessions",
    "optimizers_of",
    "release_model",
    "replacement_of",
    "session_of",
    "stop_watching_casts",
    "watch_casts",
    "when_closed",
    "with_apex_tables",
]


# Sessions


def open_sessions() -> list[Session]:
    """The open sessions, the newest last."""
    return list(registry.sessions)


def open_automatic_session(properties: Properties) -> Session:
    """Open a session without models, for a script that writes no `scale_loss`.

    The caller scales each backward pass with `session.scaled_backward`.  Calls are cast on
    accelerators, and on the devices of the optimizers that `manage_optimizer` adds.
    """
    session = Session(properties)
    session.scales_by_itself = True
    session.open([], [])
    session.policies.cast_on_accelerators()
    registry.refresh()
    return session


@contextlib.contextmanager
def with_apex_tables() -> Iterator[None]:
    """Context manager: sessions that open inside it follow apex's tables."""
    registry.opens_as_apex = True
    try:
        yield
    finally:
        registry.opens_as_apex = False


def when_closed(session: Session, action: Callable[[], None]) -> None:
    """Call `action` once: when a session closes, or is dropped with all that it managed.

    `action` must not refer to the session.
    """
    ending = weakref.finalize(session, action)
    ending.atexit = False
    session.at_close.append(ending)


def members_of(session: Session) -> list[Any]:
    """The models and optimizers that a session manages."""
    return [*(managed.model for managed in session.models.alive()), *optimizers_of(session)]


def release_model(model: nn.Module) -> None:
    """Take a model out of its session, if it is in one, as `initialize` does for a new one."""
    session = registry.models.session_of(model)
    if session is not None:
        session.release_model(model)
        registry.close_empty()


# Optimizers


def optimizers_of(session: Session) -> list[Any]:
    """The optimizers that a session manages."""
    return [managed.optimizer for managed in session.optimizers.alive()]


def session_of(given: Any) -> Session | None:
    """The open session that has an optimizer or a model, or None."""
    return registry.optimizers.session_of(given) or registry.models.session_of(given)


def managed_optimizer(optimizer: Any) -> ManagedOptimizer | None:
    """The managed counterpart of an optimizer; None where no enabled session has it."""
    return registry.optimizers.managed(optimizer)


def manage_optimizer(session: Session, optimizer: Any) -> ManagedOptimizer:
    """Add an optimizer to an open session, and cast on the devices of its parameters."""
    is_first = not session.optimizers.alive()
    managed = session.manage_optimizer(optimizer)
    managed.found_states.forget()
    session.policies.cast_on({parameter.device.type for parameter in managed.parameters()})
    if is_first:
        registry.refresh()  # torch's gradient tools are replaced while there are optimizers
    return managed


def evaluates_closure_once(optimizer: Any) -> bool:
    """Whether `optimizer.step(closure)` does what the closure and then `step()` would do.

    So it is with torch's own optimizers, but for LBFGS.
    """
    return type(optimizer) in torch_optimizers()


# Models


def in_step(
    model: nn.Module, is_sent_through_call: bool, is_compiled: bool = False
) -> AbstractContextManager[None]:
    """Context manager around a framework's step, a method of a managed model that calls its parts.

    At O2 and O3 the step's own code is outside the model: parts that it calls get half inputs and
    return FP32.  With `is_sent_through_call` the model's first call in it is the step itself, sent
    through `DistributedDataParallel`.  A step that is compiled as a whole gets the half weights of
    the whole model; what it is given is cast by the caller.
    """
    managed = registry.models.managed(model)
    if managed is None:
        return contextlib.nullcontext()
    if is_compiled:
        return managed.in_compiled_step(is_sent_through_call)
    return managed.in_step(is_sent_through_call)


# Casting


def drop_cached_weights(session: Session) -> None:
    """Forget the half copies of weights that a session has cached."""
    session.policies.cache.close()


def watch_casts(observer: CastObserver) -> None:
    """Tell `observer` of each patched call and cast, in all threads, from now on."""
    observers.append(observer)
    registry.state.watch(+1)


def stop_watching_casts(observer: CastObserver) -> None:
    """End what `watch_casts` began; nothing if it has ended."""
    if observer in observers:
        observers.remove(observer)
        registry.state.watch(-1)


def replacement_of(original: Any) -> Any:
    """What stands in for one of torch's functions now, or None."""
    return registry.installation.replaced_by(original)


def edit_tables(edits: Iterable[tuple[str, str, Rule | None]]) -> None:
    """Have torch's functions follow other rules than the tables', in sessions with apex's tables.

    An edit is a namespace ("torch", "torch.nn.functional", "torch.Tensor"), a name and a rule, or
    None for no cast.  Earlier edits are forgotten.  Raises `AttributeError` for an unknown name.
    """
    registry.edit_tables(list(edits))


def listed_function(where: str, name: str) -> Any:
    """What this torch has under `name` in a namespace of the tables, or None.

    A static method is given as such, not as the function inside.
    """
    return raw_attribute(resolve_place(where), name) if has(where, name) else None
