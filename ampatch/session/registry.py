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
from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import AmpatchError, UndoAll
from ..models.managed_model import ManagedModel
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.optimizers.state import fit_state
from .observers import Observers
from .policies import Policies, limited, mixes, outside_passes
from .table import Rows, Table, alive
from .torch_tools import TorchTools


class OpenSession(Protocol):
    """What the registry asks of a session."""

    properties: Properties
    policies: Policies
    model_rows: Rows[ManagedModel]
    optimizer_rows: Rows[ManagedOptimizer]
    is_open: bool
    may_cast: bool
    handle: Any
    forwards: OutermostForwards | None

    @property
    def models(self) -> list[ManagedModel]: ...

    def is_alive(self) -> bool: ...

    def is_empty(self) -> bool: ...

    def has_losses(self) -> bool: ...

    def policy(self) -> Policy | None: ...

    def close(self) -> None: ...


Session = TypeVar("Session", bound=OpenSession)


class Registry(Generic[Session]):
    """The open sessions, newest last, and what they share.

    `table` finds the session and the managed counterpart of a model or an optimizer.
    """

    def __init__(self, ask_state: Callable[[], CastState]) -> None:
        self.sessions: list[Session] = []
        self.state = CastState()
        self.installation = Installation(self.state, ask_state)
        self.user_functions = RegisteredFunctions(self.installation)
        self.observers = Observers()
        self.table: Table[Session] = Table()
        self.opens_as_apex = False  # sessions that open now follow apex's tables
        self._tools = TorchTools(self)
        self.table_edits: list[tuple[str, str, Rule | None]] = []

    # Sessions

    def add(self, session: Session) -> None:
        """A session opens."""
        self.sessions = [*self.sessions, session]
        self.refresh()

    def remove(self, session: Session) -> None:
        """A session closes."""
        self.sessions = [known for known in self.sessions if known is not session]
        self.refresh()

    def close_empty(self) -> None:
        """Close sessions whose models and optimizers have all been taken by later ones."""
        for session in list(self.sessions):
            if session.is_empty():
                session.close()

    def close_all(self) -> None:
        """Close every session, newest first; one that fails does not keep the others.

        Raises what was raised, when torch, and all that could be, is as it was.
        """
        undo = UndoAll("ampatch.deactivate()")
        for session in list(reversed(self.sessions)):
            undo.do(session.close)
        undo.do(self.refresh)
        undo.end()

    def latest(self, what: str) -> Session:
        """The session opened last; not one whose models and optimizers are gone.

        Raises `AmpatchError` when none is open.
        """
        found = next((known for known in reversed(self.sessions) if known.is_alive()), None)
        if found is None:
            raise AmpatchError(
                f"{what}: no ampatch session is open. "
                "Call ampatch.initialize(model, optimizer) first. A session ends when its models "
                "and optimizers are gone."
            )
        return found

    def scaling_sessions(self) -> list[Session]:
        """The sessions whose loss scales are in use, newest last: those that have optimizers."""
        return [known for known in self.sessions if known.is_alive() and known.has_losses()]

    def latest_scaling(self, what: str) -> Session:
        """The last of `scaling_sessions`; without one, the session opened last.

        Raises `AmpatchError` when none is open.
        """
        scaling = self.scaling_sessions()
        return scaling[-1] if scaling else self.latest(what)

    def session_of(self, given: Any, what: str) -> Session:
        """The session of a model or an optimizer; of None, the one opened last.

        Raises `AmpatchError` when there is none.
        """
        if given is None:
            return self.latest(what)
        found = self.table.find(given) or self.table.find_optimizer(given)
        if found is None:
            raise AmpatchError(
                f"{what}: no session has this {type(given).__name__}. Pass a model or an optimizer "
                "that ampatch.initialize, add_models or add_optimizers was given."
            )
        return found[0]

    def models(self) -> list[ManagedModel]:
        """The managed models of all open sessions."""
        return alive(*[session.model_rows for session in self.sessions])

    def optimizers(self) -> list[ManagedOptimizer]:
        """The managed optimizers of all open sessions."""
        return alive(*[session.optimizer_rows for session in self.sessions])

    def sessions_of(self, module: nn.Module) -> list[Session]:
        """The enabled sessions that manage weights of a module, or that have no models."""
        own = set(map(id, module.parameters()))

        def manages(session: Session) -> bool:
            if not (session.properties.enabled and session.model_rows):
                return session.properties.enabled
            models = [managed.model for managed in session.models]
            return any(not own.isdisjoint(map(id, model.parameters())) for model in models)

        return list(filter(manages, self.sessions))

    # Weights

    def is_lent(self, parameter: Tensor) -> bool:
        """Whether forwards of a managed model have a half copy of this weight."""
        return any(managed.lends(parameter) for managed in self.models())

    def give_back_shared(self, model: nn.Module) -> None:
        """A model is to lend its weights: those that others have made half are FP32 again."""
        own = set(map(id, model.parameters()))
        given: set[int] = set()
        for managed in self.models():
            if managed.conversions.entries:
                given |= managed.give_back(own)
        for optimizer in self.optimizers() if given else ():
            fit_state(optimizer.optimizer, given)

    # Patches and policies

    def refresh(self) -> None:
        """Make patches and the process's policy what the open sessions need.

        A session whose models and optimizers are all gone has nothing to cast, and ends here.
        """
        for ended in [known for known in self.sessions if not known.is_alive()]:
            ended.is_open = False
            self.sessions.remove(ended)
        # Asked once: a session's models may be collected, and its policy go, while this runs.
        policies = [(session, session.policy()) for session in self.sessions]
        casting = [(one, policy) for one, policy in policies if policy is not None]
        installed, has_tables = self.installation, bool(casting)
        types = {managed.properties.cast_model_type for managed in self.models()}
        has_rows = has_tables or not types.isdisjoint(HALF_TYPES)
        overridden = self._overridden() if has_rows else {}
        needed = (has_rows, has_tables, overridden)
        tables_change = needed != (installed.has_rows, installed.has_tables, installed.overridden)
        self.state.process = self.state.in_half_models = None
        if self.sessions:
            self._tools.put_in()
        if tables_change:
            self._take_out_tables()
            if has_rows:
                installed.install(has_tables, overridden)
            if has_tables:
                self.user_functions.put_all()
        self.state.process = self._outside(casting)
        by_init = [one.policies.mixed for one, _ in casting if one.handle is not None]
        self.state.in_half_models = by_init[-1] if by_init else None
        for managed in self.models() if has_rows else ():
            managed.held.put_in(installed.replacements)
        if not self.sessions:
            self._tools.take_out()

    def _outside(self, casting: list[tuple[Session, Policy]]) -> Policy | None:
        """What is in force outside managed forwards; these sessions cast calls.

        The session opened last decides whether every call of the process is cast.  If it has
        another scope, or casts nothing itself, only calls on half tensors and on parameters are.
        """
        casting = [(one, policy) for one, policy in casting if policy.gate is not mixes]
        if not casting:
            return None
        session, policy = casting[-1]
        newest = [one for one in self.sessions if one.properties.enabled and one.may_cast][-1]
        if session is newest and session.forwards is not None:
            policy = dataclasses.replace(policy, gate=session.forwards.gate)
        elif session is not newest or session.properties.patch_scope != "process":
            models = alive(*[one.model_rows for one, _ in casting])
            policy = limited(policy, [one.places for one in models if one.policy is not None])
        return outside_passes(policy)

    def _overridden(self) -> dict[Any, bool]:
        """Functions that policies have apart, and whether they are FP32 inside at every level."""
        found: dict[Any, bool] = {}
        for session in self.sessions:
            is_everywhere = not session.properties.patch_torch_functions
            for function in session.policies.tables.functions if session.properties.enabled else ():
                found[function] = found.get(function, False) or is_everywhere
        return found

    # The user's own functions, and changes to the tables

    def edit_tables(self, edits: list[tuple[str, str, Rule | None]]) -> None:
        """Have torch's functions follow other rules than the tables', where apex's tables count.

        They count for sessions that open from now on; earlier edits are forgotten.  An edit is a
        namespace ("torch", "torch.nn.functional", "torch.Tensor"), a name and a rule, or None for
        no cast.  Raises `AttributeError` for an unknown name.
        """
        for where, name, _ in edits:
            raw_attribute(resolve(where), name)
        self.table_edits = edits

    def register(self, place: object, name: str | None, rule: Rule) -> None:
        """Have one of the user's functions follow a rule, now and later, while patches are in."""
        if self.user_functions.register(place, name, rule):
            self._install_anew()

    def unregister(self, place: object, name: str | None) -> None:
        """Undo `register`."""
        self.user_functions.forget(place, name)
        self._install_anew()

    def _install_anew(self) -> None:
        if self.installation.has_tables:
            self._take_out_tables()
            self.refresh()

    def _take_out_tables(self) -> None:
        for managed in self.models():
            managed.held.take_out()
        self.installation.undo()
