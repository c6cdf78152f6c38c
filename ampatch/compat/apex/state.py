"""apex.amp._amp_state: apex's private state for scripts that read and write it.

As in apex, entry 0 of `loss_scalers` belongs to the newest `initialize` with an optimizer; those of
earlier sessions in use follow.  All other attributes show the session opened last.  Attributes that
apex's `initialize` sets are missing before it, because scripts ask `hasattr`.
"""

from __future__ import annotations

import weakref
from itertools import chain
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ampatch import master_params
from ampatch.torch_private.modules import BATCH_NORMS

from ...session import facade
from .scaler import LossScaler

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """`apex.amp._amp_state`.  A script may set attributes of its own on it."""

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False  # ampatch always accepts half models
        self.verbosity = 1

    def maybe_print(self, message: str, rank0: bool = False) -> None:
        """Print a message, at verbosity above 0."""
        if self.verbosity > 0:
            print(message)

    def warn_or_err(self, message: str) -> None:
        """Raise `RuntimeError`, or print the message if `hard_override` is set."""
        if not self.hard_override:
            raise RuntimeError(message)
        print(f"Warning: {message}")

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """One per loss; `_amp_state.loss_scalers[0]._loss_scale = 2.0**20` takes effect."""
        self._session("loss_scalers")
        return [scaler for session in scaling_sessions() for scaler in scalers_of(session)]

    @property
    def opt_properties(self) -> Properties:
        return Properties(self._session("opt_properties").properties)

    @property
    def handle(self) -> SessionHandle:
        """The handle; its `_deactivate()` removes the patches of torch's functions."""
        return handle_of(self._session("handle"))

    def _session(self, name: str) -> facade.Session:
        """The newest session of `initialize`, or of `init` if there is no other."""
        sessions = facade.open_sessions()
        if not sessions:
            raise AttributeError(f"_amp_state has no {name!r} before amp.initialize.", name=name)
        return ([session for session in sessions if session.init_handle is None] or sessions)[-1]


_open_at_deactivate: weakref.WeakSet[facade.Session] = weakref.WeakSet()  # of any handle


def scaling_sessions() -> list[facade.Session]:
    """The sessions in `loss_scalers`: the newest with an optimizer, then earlier ones in use."""
    sessions = facade.scaling_or_newest_sessions()[::-1]
    sessions = [s for s in sessions if s.init_handle is None or s.optimizers] or sessions
    return [s for s in sessions if s is sessions[0] or s not in _open_at_deactivate]


_scalers: weakref.WeakKeyDictionary[facade.Session, dict[int, LossScaler]]
_scalers = weakref.WeakKeyDictionary()


def scalers_of(session: facade.Session) -> list[LossScaler]:
    """The scalers of a session as scripts see them: the same objects each time."""
    existing = _scalers.setdefault(session, {})
    for loss_id in range(len(existing), len(session.scalers)):
        existing[loss_id] = LossScaler.of(session.scalers[loss_id], session)
    return list(existing.values())


def scaler_in_use(session: facade.Session | None, loss_id: int) -> LossScaler | None:
    """The `LossScaler` of a loss, or None if the script has not read `loss_scalers`."""
    return None if session is None else _scalers.get(session, {}).get(loss_id)


class Properties:
    """The settings of `initialize`, or apex's defaults, as attributes and as a dict `options`."""

    def __init__(self, properties: Any = None) -> None:
        self._properties = _DEFAULTS if properties is None else properties

    @property
    def options(self) -> dict[str, Any]:
        """apex's seven settings by name."""
        return {name: getattr(self, name) for name in vars(_DEFAULTS)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_properties":
            raise AttributeError(name)
        return getattr(self._properties, name)


_DEFAULTS = SimpleNamespace(
    enabled=False, opt_level=None, cast_model_type=None, patch_torch_functions=False,
    keep_batchnorm_fp32=None, master_weights=None, loss_scale=1.0,
)  # fmt: skip


class SessionHandle:
    """The handle of a session that `initialize` opened."""

    def __init__(self, session: facade.Session) -> None:
        self._session = session

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    def is_active(self) -> bool:
        """Whether the session is open and enabled, and `_deactivate` was not called."""
        session = self._session
        return session.is_open and session.properties.enabled and session.may_cast

    def _deactivate(self) -> None:
        """As in apex: torch's functions are restored; models and loss scales stay."""
        self._session.stop_casting()
        _open_at_deactivate.update(facade.open_sessions())

    def _clear_cache(self) -> None:
        self._session.drop_copies()


def handle_of(session: facade.Session) -> Any:
    """The handle of a session: what `init` returned, if `init` opened the session."""
    return session.init_handle or SessionHandle(session)


class Stash:
    """`optimizer._amp_stash`: its parameters, as apex sorted them.

    Weights are FP32 in the model at O2 too, so there are no masters beside them.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.lazy_init_called = False
        self.has_stepped = False  # since the last block began

    all_fp16_params = all_fp32_from_fp16_params = property(lambda self: [])

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters."""
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def begin_block(self) -> None:
        """At the start of an O2 `scale_loss` block, drop the gradients that a step has used.

        In apex each step dropped the gradients of the master weights, and the next block dropped
        the gradients of the half weights.  Gradients of FP32 weights (of BatchNorm) accumulate.
        """
        session = facade.session_of(self._optimizer) if self.has_stepped else None
        self.has_stepped = False
        used = [param for param in self.all_fp32_from_fp32_params if param.grad is not None]
        if session is None or not session.properties.uses_half_copies or not used:
            return
        kept = BATCH_NORMS if session.properties.keep_batchnorm_fp32 else ()
        modules = [m for managed in session.models for m in managed.model.modules()]
        params = [m.parameters(recurse=False) for m in modules if not isinstance(m, kept)]
        half_in_apex = set(map(id, chain.from_iterable(params)))
        for param in used:
            if id(param) in half_in_apex:
                param.grad = None


_amp_state = AmpState()
maybe_print, warn_or_err = _amp_state.maybe_print, _amp_state.warn_or_err
