"""The open sessions, what they manage, and the objects of which a process has only one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from ..casting.calls import CastState
from ..casting.install import Installation, RegisteredFunctions
from ..casting.outermost_forwards import OutermostForwards
from ..casting.places import raw_attribute, resolve
from ..casting.policy import Policy
from ..casting.tables import Rule
from ..config.opt_levels import HALF_DTYPES, Properties
from ..errors import AmpatchError, UndoAll
from ..models.managed_model import ManagedModel
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.optimizers.state import match_state_dtypes
from .object_registry import ManagedRefs, ObjectRegistry, live_counterparts
from .observers import Observers
from .policies import Policies, has_mixed_dtypes, limited_to_parameters, outside_backward
from .torch_tools import TorchTools


class OpenSession(Protocol):
    """The part of a session that the registry uses."""

    properties: Properties
    policies: Policies
    model_entries: ManagedRefs[ManagedModel]
    optimizer_entries: ManagedRefs[ManagedOptimizer]
    is_open: bool
    may_cast: bool
    init_handle: Any
    outermost_forwards: OutermostForwards | None

    @property
    def models(self) -> list[ManagedModel]: ...

    def is_alive(self) -> bool: ...

    def has_released_all(self) -> bool: ...

    def scales_losses(self) -> bool: ...

    def policy(self) -> Policy | None: ...

    def close(self) -> None: ...


SessionT = TypeVar("SessionT", bound=OpenSession)


class Registry(Generic[SessionT]):
    """The open sessions, newest last, and what they share.

    `objects` finds the session and the managed counterpart of a model or an optimizer.
    """

    def __init__(self, get_state: Callable[[], CastState]) -> None:
        self.sessions: list[SessionT] = []
        self.state = CastState()
        self.installation = Installation(self.state, get_state)
        self.user_functions = RegisteredFunctions(self.installation)
        self.observers = Observers()
        self.objects: ObjectRegistry[SessionT] = ObjectRegistry()
        self.opens_with_apex_tables = False  # whether new sessions follow apex's op tables
        self._tools = TorchTools(self)
        self.table_edits: list[tuple[str, str, Rule | None]] = []

    # Sessions

    def add(self, session: SessionT) -> None:
        """Add a session that opens."""
        self.sessions = [*self.sessions, session]
        self.refresh()

    def remove(self, session: SessionT) -> None:
        """Remove a session that closes."""
        self.sessions = [other for other in self.sessions if other is not session]
        self.refresh()

    def close_empty(self) -> None:
        """Close sessions that have released all their models and optimizers."""
        for session in list(self.sessions):
            if session.has_released_all():
                session.close()

    def close_all(self) -> None:
        """Close every session, newest first.  If closing one fails, the others are still closed.

        Raises the errors at the end, after everything else is restored.
        """
        undo = UndoAll("ampatch.deactivate()")
        for session in list(reversed(self.sessions)):
            undo.do(session.close)
        undo.do(self.refresh)
        undo.end()

    def newest(self, user_call: str) -> SessionT:
        """The newest session whose models and optimizers still exist.

        Raises `AmpatchError` if there is none.
        """
        session = next((each for each in reversed(self.sessions) if each.is_alive()), None)
        if session is None:
            raise AmpatchError(
                f"{user_call}: no ampatch session is open. "
                "Call ampatch.initialize(model, optimizer) first. A session ends when its models "
                "and optimizers no longer exist."
            )
        return session

    def scaling_sessions(self) -> list[SessionT]:
        """The sessions that have optimizers, and so use their loss scales, newest last."""
        return [
            session for session in self.sessions if session.is_alive() and session.scales_losses()
        ]

    def newest_scaling(self, user_call: str) -> SessionT:
        """The newest of `scaling_sessions`, or, if there are none, the newest session.

        Raises `AmpatchError` if no session is open.
        """
        scaling = self.scaling_sessions()
        return scaling[-1] if scaling else self.newest(user_call)

    def require_session_of(self, obj: Any, user_call: str) -> SessionT:
        """The session of a model or an optimizer.  For None, the newest session.

        Raises `AmpatchError` if there is none.
        """
        if obj is None:
            return self.newest(user_call)
        session, _ = self.objects.find(obj) or self.objects.find_optimizer(obj) or (None, None)
        if session is None:
            raise AmpatchError(
                f"{user_call}: no session has this {type(obj).__name__}. Pass a model or an "
                "optimizer that was passed to ampatch.initialize, add_models or add_optimizers."
            )
        return session

    def models(self) -> list[ManagedModel]:
        """The managed models of all open sessions."""
        return live_counterparts(*[session.model_entries for session in self.sessions])

    def optimizers(self) -> list[ManagedOptimizer]:
        """The managed optimizers of all open sessions."""
        return live_counterparts(*[session.optimizer_entries for session in self.sessions])

    def sessions_of(self, module: nn.Module) -> list[SessionT]:
        """The enabled sessions that manage weights of a module, or that have no models."""
        param_ids = set(map(id, module.parameters()))

        def manages(session: SessionT) -> bool:
            if not (session.properties.enabled and session.model_entries):
                return session.properties.enabled
            models = [managed.model for managed in session.models]
            return any(not param_ids.isdisjoint(map(id, model.parameters())) for model in models)

        return list(filter(manages, self.sessions))

    # Weights

    def has_half_copy(self, parameter: Tensor) -> bool:
        """Whether forwards of a managed model have a half copy of this weight."""
        return any(managed.has_half_copy(parameter) for managed in self.models())

    def restore_fp32_weights(self, model: nn.Module) -> None:
        """Make FP32 again those of the model's weights that another model, at O3, has made half.

        To be called before O2 manages the model.
        """
        param_ids = set(map(id, model.parameters()))
        restored: set[int] = set()
        for managed in self.models():
            if managed.conversions.entries:
                restored |= managed.restore_fp32_weights(param_ids)
        for optimizer in self.optimizers() if restored else ():
            match_state_dtypes(optimizer.optimizer, restored)

    # Patches and policies

    def refresh(self) -> None:
        """Install the patches, and the policy of the process, that the open sessions need.

        Also removes the sessions whose models and optimizers were all garbage-collected.
        """
        for ended in [session for session in self.sessions if not session.is_alive()]:
            ended.is_open = False
            self.sessions.remove(ended)
        # Read once: models may be collected while this runs, and then their session has no policy.
        policies = [(session, session.policy()) for session in self.sessions]
        casting = [(session, policy) for session, policy in policies if policy is not None]
        installation = self.installation
        needs_cast_tables = bool(casting)
        model_dtypes = {managed.properties.cast_model_type for managed in self.models()}
        needs_every_level_rows = needs_cast_tables or not model_dtypes.isdisjoint(HALF_DTYPES)
        overridden_functions = self._overridden_functions() if needs_every_level_rows else {}
        needed = (needs_every_level_rows, needs_cast_tables, overridden_functions)
        tables_change = needed != (
            installation.has_every_level_rows,
            installation.has_cast_tables,
            installation.overridden_functions,
        )
        self.state.process_policy = self.state.half_model_policy = None
        if self.sessions:
            self._tools.install()
        if tables_change:
            self._uninstall_tables()
            if needs_every_level_rows:
                installation.install(needs_cast_tables, overridden_functions)
            if needs_cast_tables:
                self.user_functions.patch_all()
        self.state.process_policy = self._process_policy(casting)
        by_init = [s.policies.mixed_dtypes_policy for s, _ in casting if s.init_handle is not None]
        self.state.half_model_policy = by_init[-1] if by_init else None
        for managed in self.models() if needs_every_level_rows else ():
            managed.held_functions.bind_replacements(installation.replacements)
        if not self.sessions:
            self._tools.uninstall()

    def _process_policy(self, casting: list[tuple[SessionT, Policy]]) -> Policy | None:
        """The policy outside managed forwards.  `casting`: the sessions that cast calls.

        If the newest session has `patch_scope="process"`, every call is cast, otherwise only calls
        on half tensors and on parameters.
        """
        casting = [pair for pair in casting if pair[1].condition is not has_mixed_dtypes]
        if not casting:
            return None
        session, policy = casting[-1]
        newest = [each for each in self.sessions if each.properties.enabled and each.may_cast][-1]
        if session is newest and session.outermost_forwards is not None:
            policy = dataclasses.replace(policy, condition=session.outermost_forwards.condition)
        elif session is not newest or session.properties.patch_scope != "process":
            models = live_counterparts(*[each.model_entries for each, _ in casting])
            policy = limited_to_parameters(
                policy, [each.parameter_owners for each in models if each.policy is not None]
            )
        return outside_backward(policy)

    def _overridden_functions(self) -> dict[Any, bool]:
        """The new value of `Installation.overridden_functions`."""
        runs_in_fp32: dict[Any, bool] = {}
        for session in self.sessions:
            has_no_tables = not session.properties.patch_torch_functions
            for function in (
                session.policies.tables_policy.functions if session.properties.enabled else ()
            ):
                runs_in_fp32[function] = runs_in_fp32.get(function, False) or has_no_tables
        return runs_in_fp32

    # The user's own functions, and edits of apex's op tables

    def edit_tables(self, edits: list[tuple[str, str, Rule | None]]) -> None:
        """Replace rules of apex's op tables, in sessions that open from now on.

        Earlier edits are dropped.  An edit is a namespace ("torch", "torch.nn.functional",
        "torch.Tensor"), a name, and a rule (None: no cast).  Raises `AttributeError` for an unknown
        name.
        """
        for where, name, _ in edits:
            raw_attribute(resolve(where), name)
        self.table_edits = edits

    def register(self, place: object, name: str | None, rule: Rule) -> None:
        """Have one of the user's functions follow a rule, in sessions that cast calls."""
        if self.user_functions.register(place, name, rule):
            self._reinstall()

    def unregister(self, place: object, name: str | None) -> None:
        """Undo `register`."""
        self.user_functions.forget(place, name)
        self._reinstall()

    def _reinstall(self) -> None:
        if self.installation.has_cast_tables:
            self._uninstall_tables()
            self.refresh()

    def _uninstall_tables(self) -> None:
        for managed in self.models():
            managed.held_functions.bind_originals()
        self.installation.undo()
