"""What open sessions share: the patches, the cast state, the observers."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..casting.handlers import FunctionModes
from ..casting.install import Installation, raw_attribute, resolve
from ..casting.patches import PatchSet
from ..casting.policy import CastState, Policy
from ..casting.rebind import keep_replaced
from ..casting.registered_functions import RegisteredFunctions
from ..casting.tables import Rule
from ..errors import AmpatchError, TakingOut
from ..interop import (
    clip_grad,
    ddp,
    distributed_checkpoint,
    fx_jit,
    module_dtype,
    parameter_data,
    swa,
)
from ..interop.lr_scheduler import HeldSchedulers
from ..scaling.optimizers.unmanaged import RefuseStrangers, TellOfSteps
from .index import Whereabouts
from .policies import mixes

if TYPE_CHECKING:
    from ..models.managed_model import ManagedModel
    from ..scaling.optimizer import ManagedOptimizer
    from .session import Session


class Registry:
    """The open sessions, newest last, and the things there is one of per process."""

    def __init__(self, ask_state: Callable[[], CastState]) -> None:
        self.state = CastState()
        self.installation = Installation(self.state, ask_state)
        self.sessions: list[Session] = []
        self.cared_for = Whereabouts(operator.attrgetter("optimizer"))
        self.modelled = Whereabouts(operator.attrgetter("model"))
        self.care_of = self.cared_for.find  # an attribute: every `scale_loss` asks
        self.schedulers = HeldSchedulers(self.managed)
        self.opens_as_apex = False  # whether a session that opens is to keep to what apex did
        self._closing_all = False
        self._gradient_tools = PatchSet()
        self._watching_tools = PatchSet()
        self._tracing_tools = PatchSet()
        self._modes = FunctionModes(self.state)
        self._averages = PatchSet()
        self._conversions = PatchSet()
        self._distributed_state = PatchSet()
        self._awaits_distributed_state = False
        self._data_access = PatchSet()
        self._strangers = RefuseStrangers(self._wanting_masters)
        self._steps = TellOfSteps(self._forget_copies)
        self._wrapped: list[tuple[weakref.ref, set[int]]] = []  # DDPs, and ids of modules in them
        self._observers: list[Any] = []
        self.is_observed = False
        self.user_functions = RegisteredFunctions(self.installation)
        self._table_edits: list[tuple[str, str, Rule | None]] = []

    # Sessions

    def add(self, session: Session) -> None:
        """A session opens.  Sessions whose models and optimizers are all gone leave the list."""
        alive = []
        for known in self.sessions:
            if known.is_alive():
                alive.append(known)
            else:
                known.skips.close()
        self.sessions = [*alive, session]
        self.refresh()

    def remove(self, session: Session) -> None:
        """A session closes."""
        self.sessions = [known for known in self.sessions if known is not session]
        if not self._closing_all:
            self.refresh()

    def refresh(self) -> None:
        """Make patches and the process's policy what the open sessions need."""
        # Asked once: a session's models may be collected, and its policy go, while this runs.
        policies = [(session, session.policy) for session in self.sessions]
        casting = [(one, policy) for one, policy in policies if policy is not None]
        by_tables = [(one, policy) for one, policy in casting if policy.follows_tables]
        self.state.process = None
        if not casting or bool(by_tables) != self.installation.has_tables:
            self._averages.undo()
            self._gradient_tools.undo()  # some lie over patches of the tables
            self.installation.undo()
        is_new = bool(by_tables) and not self.installation.has_tables
        if is_new:
            self._averages.undo()
            self._gradient_tools.undo()
            self.installation.install()
            self.user_functions.put_all()
        for session, policy in casting:
            self._apply_special(session, policy)
        outside = [policy for _, policy in by_tables or casting if policy.gate is not mixes]
        self.state.process = outside[-1] if outside else None
        if is_new:
            self.installation.regions.begin()
        self._refresh_tools()

    def _apply_special(self, session: Session, policy: Policy) -> None:
        if policy.apex_flavour:
            self.installation.install_apex_rows(self._table_edits)
        for function, precision in session.function_rules.items():
            original = self.installation.original(function)
            self.installation.ensure(original)
            dtype = torch.float32 if precision == "float" else session.properties.dtype
            session.override_function(original, dtype)

    def _refresh_tools(self) -> None:
        self._modes.watch(bool(self.sessions))
        have_optimizers = any(session.optimizers() for session in self.sessions)
        keep_replaced(
            self._gradient_tools,
            have_optimizers,
            lambda: [
                *clip_grad.replacements(self.ready_grads, self.forget_overflow),
                *ddp.replacements(self.agree_masters, self._note_wrapped),
                *swa.replacements(self.current_master_of, self.managed_half),
            ],
        )
        keep_replaced(
            self._averages,
            any(session.has_half_models() for session in self.sessions),
            lambda: swa.watched(self.managed_half),
        )
        self._strangers.keep(any(session.wants_masters() for session in self.sessions))
        self._steps.keep(self.installation.has_tables)
        keep_replaced(
            self._data_access,
            self.installation.has_tables
            or any(len(one.masters) for session in self.sessions for one in session.optimizers()),
            lambda: [parameter_data.replacement(self.note_data_access)],
        )
        keep_replaced(
            self._watching_tools,
            self.installation.has_tables,
            lambda: [(Tensor, "register_hook", self._noting_hooks)],
        )
        keep_replaced(
            self._tracing_tools,
            self.state.process is not None or any(session.models() for session in self.sessions),
            lambda: fx_jit.replacements(self.managed_model, self.state),
        )

        keep_replaced(
            self._conversions,
            any(session.models() for session in self.sessions),
            lambda: module_dtype.replacements(self.model_with, self.masters_in, self.undressed),
        )
        if have_optimizers and not (
            distributed_checkpoint.is_imported() or self._awaits_distributed_state
        ):
            self._awaits_distributed_state = True
            distributed_checkpoint.when_imported(self._refresh_tools)
        keep_replaced(
            self._distributed_state,
            have_optimizers and distributed_checkpoint.is_imported(),
            lambda: distributed_checkpoint.replacements(
                self.current_master_of, self.without_methods
            ),
        )

    def close_empty(self) -> None:
        """Close sessions whose models and optimizers have all been taken by later ones."""
        for session in list(self.sessions):
            if session.is_empty():
                session.close()

    def close_all(self) -> None:
        """Close every session, newest first; one that fails does not keep the others.

        Raises what was raised, when torch, and all that could be, is as it was.
        """
        taking_out = TakingOut("ampatch.deactivate()")
        self._closing_all = True
        for session in list(reversed(self.sessions)):
            taking_out.do(session.close)
        self._closing_all = False
        taking_out.do(self.refresh)
        taking_out.do(self.schedulers.release)
        taking_out.end()

    def report_closing(self) -> None:
        """The process ends: say of each session what was skipped, unless that was said."""
        for session in self.sessions:
            session.skips.close()

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
        return self.cared_for.session_of(optimizer)

    def managed(self, optimizer: Any) -> ManagedOptimizer | None:
        """Our side of an optimizer, or None."""
        return self.cared_for.ours(optimizer)

    def session_of_model(self, model: Any) -> Session | None:
        """The session that manages a model."""
        return self.modelled.session_of(model)

    def managed_model(self, model: Any) -> ManagedModel | None:
        """Our side of a model, or None."""
        return self.modelled.ours(model)

    def managed_half(self, tensor: Tensor) -> tuple[str, bool] | None:
        """The managed half parameter that a tensor is, or shares memory with: its name, and
        whether it has a master.
        """
        place = tensor.data_ptr()
        for session in self.sessions:
            for managed in session.models():
                for name, parameter in managed.model.named_parameters():
                    if parameter.dtype is tensor.dtype and parameter.data_ptr() == place:
                        has_master = session.master_of(parameter) is not None
                        return f"{type(managed.model).__name__}.{name}", has_master
        return None

    def without_methods(self, optimizer: Any) -> AbstractContextManager:
        """Context manager: an optimizer is without methods of ours, if it has any."""
        managed = self.managed(optimizer)
        return contextlib.nullcontext() if managed is None else managed.without_methods()

    def model_with(self, module: Any) -> Any:
        """The managed model that has tensors which `module` has too, or None."""
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for session in self.sessions:
            for managed in session.models():
                tensors = (*managed.model.parameters(), *managed.model.buffers())
                if not own.isdisjoint(map(id, tensors)):
                    return managed.model
        return None

    @contextlib.contextmanager
    def undressed(self, halves: set[int]) -> Iterator[None]:
        """Half weights (ids) are parameters as torch made them."""
        with contextlib.ExitStack() as stack:
            for session in self.sessions if halves else ():
                for managed in session.optimizers():
                    stack.enter_context(managed.masters.undressed(halves))
            yield

    def masters_in(self, module: Any) -> list[tuple[Tensor, Tensor]]:
        """The half parameters of a module that have masters, with these."""
        pairs = [(half, self.current_master_of(half)) for half in module.parameters()]
        return [(half, master) for half, master in pairs if master is not None]

    def master_of(self, half: Tensor) -> Tensor | None:
        """The FP32 master of a half parameter in any session, or None."""
        return _first(session.master_of(half) for session in reversed(self.sessions))

    def current_master_of(self, half: Tensor) -> Tensor | None:
        """As `master_of`; what was written into the half parameter has been taken over."""
        return _first(session.current_master_of(half) for session in reversed(self.sessions))

    def agree_masters(self, parameters: Sequence[Tensor], send: Callable[[Tensor], None]) -> None:
        """Have `send` make the masters of these parameters equal on all ranks."""
        for session in self.sessions:
            for managed in session.optimizers():
                for parameter in parameters:
                    if managed.masters.of(parameter) is not None:
                        managed.masters.agree(parameter, send)

    def reduces(self, model: Any) -> bool | None:
        """Whether DDP averages the gradients of the forward that begins; None: no DDP has it."""
        found = [
            wrapper.require_backward_grad_sync
            for ref, modules in self._wrapped
            if id(model) in modules and (wrapper := ref()) is not None
        ]
        return any(found) if found else None

    def _wanting_masters(self) -> set[int]:
        return set().union(*(session.wanting_masters() for session in self.sessions))

    def _note_wrapped(self, wrapper: Any) -> None:
        self._wrapped = [entry for entry in self._wrapped if entry[0]() is not None]
        self._wrapped.append((weakref.ref(wrapper), set(map(id, wrapper.module.modules()))))

    def ready_grads(self, tensors: list[Tensor]) -> None:
        """Gradients of these tensors are about to be used: gather and unscale what waits."""
        wanted = {id(tensor) for tensor in tensors}
        for session in self.sessions:
            for managed in session.optimizers():
                managed.ready(wanted)

    def note_data_access(self, parameter: Tensor, data: Tensor | None) -> None:
        """Somebody was given `parameter.data`, to write into it unseen, or (None) replaced it."""
        for session in self.sessions:
            session.forget_copy(parameter)
            for managed in session.optimizers():
                managed.masters.touched(parameter, data)

    def _forget_copies(self) -> None:
        """An optimizer has stepped; a fused one raises no versions of weights."""
        for session in self.sessions:
            session.forget_copies()

    def _noting_hooks(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def register_hook(tensor: Tensor, hook: Callable) -> Any:
            if not is_dynamo_compiling():
                for session in self.sessions:
                    session.note_hook()
            return original(tensor, hook)

        return register_hook

    def forget_overflow(self, zeroed: set[int]) -> None:
        """Gradients of these parameters (ids) were zeroed by their module."""
        for session in self.sessions:
            for managed in session.optimizers():
                managed.forget_overflow(zeroed)

    def half_of(self, master: Tensor) -> Tensor | None:
        """The half parameter of a master in any session, or None."""
        return _first(
            managed.masters.half_of(master)
            for session in self.sessions
            for managed in session.optimizers()
        )

    def outside_step(self) -> Any:
        """The policy in force around the step that is running: a closure's forward runs in it."""
        return self.state.covered()

    # Observers

    def observe(self, observer: Any) -> Callable[[], None]:
        """Tell `observer` of what happens; returns what takes it out again."""
        self._observers.append(observer)
        self.is_observed = True
        return lambda: self._stop_telling(observer)

    def _stop_telling(self, observer: Any) -> None:
        if observer in self._observers:
            self._observers.remove(observer)
        self.is_observed = bool(self._observers)

    def tell(self, event: str, *values: Any) -> None:
        """Call the observers' method `event`, where they have one."""
        for observer in list(self._observers):  # some leave when they are told
            method = getattr(observer, event, None)
            if method is not None:
                method(*values)

    # The user's own functions, and changes to the tables

    def edit_tables(self, edits: list[tuple[str, str, Rule | None]]) -> None:
        """Have torch's functions follow other rules than the tables', in apex's flavour.

        An edit is a namespace ("torch", "torch.nn.functional", "torch.Tensor"), a name and
        a rule, or None for no cast.  Earlier edits are forgotten.  Raises `AttributeError` for an unknown name.
        """
        for where, name, _ in edits:
            raw_attribute(resolve(where), name)
        if edits == self._table_edits:
            return
        self._table_edits = list(edits)
        self._install_anew()

    def register(self, place: Any, name: str | None, rule: Rule) -> None:
        """Have a function of the user's follow a rule, now if patches are in, and when they are."""
        if self.user_functions.register(place, name, rule):
            self._install_anew()

    def unregister(self, place: Any, name: str | None) -> None:
        """Take that back."""
        self.user_functions.forget(place, name)
        self._install_anew()

    def _install_anew(self) -> None:
        if self.installation.has_tables:
            self._averages.undo()
            self._gradient_tools.undo()
            self.installation.undo()
            self.refresh()


def _first(found: Iterable[Any]) -> Any:
    """The first that is not None, or None."""
    return next((one for one in found if one is not None), None)
