"""What open sessions share: the patches, the cast state, the observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import averaging
from .casting import user_functions
from .casting.install import (
    Installation,
    early_names,
    parse_place,
    raw_attribute,
    resolve_user_place,
    when_importable,
)
from .casting.patches import PatchSet
from .casting.policy import CastState
from .casting.tables import Rule
from .errors import AmpatchError
from .log import logger

if TYPE_CHECKING:
    from .scaling.optimizer import ManagedOptimizer
    from .session import Session

GradientPatches = Callable[
    [Callable[[Tensor], "Tensor | None"], Callable[[], None], Callable[[set[int]], None]],
    list[tuple[Any, str, Callable[[Any], Any]]],
]


class Registry:
    """The open sessions, newest last, and the things there is one of per process."""

    def __init__(
        self, gradient_patches: GradientPatches, ask_state: Callable[[], CastState]
    ) -> None:
        self.state = CastState()
        self.installation = Installation(self.state, ask_state)
        self.sessions: list[Session] = []
        self._gradient_patches = gradient_patches
        self._gradient_tools = PatchSet()
        self._observers: list[Any] = []
        self._user_functions: list[tuple[Any, str, Rule]] = []

    # Sessions

    def add(self, session: Session) -> None:
        """A session opens.  Sessions whose models and optimizers are all gone leave the list."""
        self.sessions = [known for known in self.sessions if known.is_alive()]
        self.sessions.append(session)
        self.refresh()

    def remove(self, session: Session) -> None:
        """A session closes."""
        self.sessions = [known for known in self.sessions if known is not session]
        self.refresh()

    def refresh(self) -> None:
        """Make patches and the process's policy what the open sessions need."""
        casting = [session for session in self.sessions if session.policy is not None]
        by_tables = [session for session in casting if session.policy.follows_tables]
        self.state.process = None
        if not casting or bool(by_tables) != self.installation.has_tables:
            self.installation.undo()
        if by_tables and not self.installation.has_tables:
            self.installation.install()
            for place in self._user_functions:
                self._put_user_function(*place)
        for session in casting:
            self._apply_special(session)
        if casting:
            self.state.process = (by_tables or casting)[-1].policy
        self._refresh_gradient_tools()

    def _apply_special(self, session: Session) -> None:
        if session.policy.apex_flavour:
            self.installation.install_apex_rows()
        for function, precision in session.function_rules.items():
            original = self.installation.original(function)
            self.installation.ensure(original)
            dtype = torch.float32 if precision == "float" else session.properties.dtype
            session.override_function(original, dtype)

    def check_functions(self, functions: dict[Callable, str]) -> None:
        """Raise `ValueError` for functions in `overrides` that could not be patched."""
        for function, precision in functions.items():
            what = f"ampatch.initialize(overrides={{{function!r}: {precision!r}}})"
            if not self.installation.can_patch(self.installation.original(function)):
                raise ValueError(
                    f"{what}: this function is not found in torch, "
                    "torch.nn.functional, torch.linalg, torch.special or on "
                    "torch.Tensor. For functions of your own use "
                    "ampatch.register_float_function or register_half_function."
                )

    def _refresh_gradient_tools(self) -> None:
        needed = any(True for session in self.sessions for _ in session.optimizers())
        if needed and not len(self._gradient_tools):
            made = {}
            patches = self._gradient_patches(
                self.master_of, self.collect_grads, self.forget_overflow
            )
            for owner, name, make in (*patches, averaging.replacement(self.current_master_of)):
                original = self._gradient_tools.replace(owner, name, make)
                made[id(original)] = getattr(owner, name)
            for module, name, original in early_names(made):
                put = made[id(original)]
                self._gradient_tools.replace(module, name, lambda _, put=put: put)
        elif not needed:
            self._gradient_tools.undo()

    def close_empty(self) -> None:
        """Close sessions whose models and optimizers have all been taken by later ones."""
        for session in list(self.sessions):
            if session.is_empty():
                session.close()

    def close_all(self) -> None:
        """Close every session, newest first."""
        for session in list(reversed(self.sessions)):
            session.close()

    # Questions

    def latest(self, what: str) -> Session:
        """The session opened last.  Raises `AmpatchError` when none is open."""
        if not self.sessions:
            raise AmpatchError(
                f"{what}: no ampatch session is open. "
                "Call ampatch.initialize(model, optimizer) first."
            )
        return self.sessions[-1]

    def session_of(self, optimizer: Any) -> Session | None:
        """The session that an optimizer was given to."""
        for session in reversed(self.sessions):
            if session.knows(optimizer):
                return session
        return None

    def managed(self, optimizer: Any) -> ManagedOptimizer | None:
        """Our side of an optimizer, or None."""
        session = self.session_of(optimizer)
        return None if session is None else session.managed(optimizer)

    def session_of_model(self, model: Any) -> Session | None:
        """The session that manages a model."""
        for session in reversed(self.sessions):
            if any(managed.model is model for managed in session.models()):
                return session
        return None

    def master_of(self, half: Tensor) -> Tensor | None:
        """The FP32 master of a half parameter in any session, or None."""
        for session in reversed(self.sessions):
            master = session.master_of(half)
            if master is not None:
                return master
        return None

    def collect_grads(self) -> None:
        """Move what a plain `backward()` left in half parameters to their masters."""
        for session in self.sessions:
            for managed in session.optimizers():
                managed.take_unscaled()

    def current_master_of(self, half: Tensor) -> Tensor | None:
        """As `master_of`; what was written into the half parameter has been taken over."""
        for session in reversed(self.sessions):
            master = session.current_master_of(half)
            if master is not None:
                return master
        return None

    def forget_overflow(self, zeroed: set[int]) -> None:
        """Gradients of these parameters (ids) were zeroed by their module."""
        for session in self.sessions:
            for managed in session.optimizers():
                managed.forget_overflow(zeroed)

    def half_of(self, master: Tensor) -> Tensor | None:
        """The half parameter of a master in any session, or None."""
        for session in self.sessions:
            for managed in session.optimizers():
                half = managed.masters.half_of(master)
                if half is not None:
                    return half
        return None

    def outside_step(self) -> Any:
        """The policy in force around the step that is running: a closure's forward runs in it."""
        return self.state.covered()

    # Observers

    def observe(self, observer: Any) -> Callable[[], None]:
        """Tell `observer` of what happens; returns what takes it out again."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer) if observer in self._observers else None

    def tell(self, event: str, *values: Any) -> None:
        """Call the observers' method `event`, where they have one."""
        for observer in list(self._observers):  # some leave when they are told
            method = getattr(observer, event, None)
            if method is not None:
                method(*values)

    # The user's own functions

    def register(self, place: Any, name: str | None, rule: Rule) -> None:
        """Have a function of the user's follow a rule, now if patches are in, else when they are.

        Raises `AttributeError` if the module is there and the name is not, `TypeError`
        for something that cannot follow a rule.
        """
        owner, attribute = parse_place(place, name)
        resolved = resolve_user_place(owner)
        if resolved is not None:
            title = getattr(resolved, "__name__", resolved)
            if not hasattr(resolved, attribute):
                raise AttributeError(
                    f"{title} has no attribute {attribute!r}; nothing was registered."
                )
            what = f"ampatch.register_{rule.value}_function({title}, {attribute!r})"
            user_functions.check(raw_attribute(resolved, attribute), what)
        self._user_functions.append((owner, attribute, rule))
        if self.installation.has_tables:
            self._put_user_function(owner, attribute, rule)

    def _put_user_function(self, owner: Any, name: str, rule: Rule) -> None:
        resolved = resolve_user_place(owner)
        if resolved is not None:
            self.installation.put_user_function(resolved, name, rule)
            return

        def on_import(module: Any) -> None:
            if self.installation.has_tables:
                self.installation.put_user_function(module, name, rule)

        logger.info("%s.%s will be patched when %s is imported.", owner, name, owner)
        when_importable(owner, on_import)
