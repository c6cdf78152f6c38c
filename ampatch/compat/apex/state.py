"""apex.amp._amp_state: apex's private state for scripts that read and write it.

`loss_scalers` are those of all sessions that have an optimizer, in the order of `initialize`, as
apex has one list of them; all else is a view of the session opened last.  Attributes that apex
sets in `initialize` are missing before it, so `hasattr` returns what it returns with apex.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ampatch import master_params

from ...session import facade as engine
from .scaler import LossScaler

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print"]


class AmpState:
    """`apex.amp._amp_state`.  A script may set attributes of its own on it."""

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False  # ampatch always accepts half models
        self.verbosity = 1

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """One per loss; `_amp_state.loss_scalers[0]._loss_scale = 2.0**20` takes effect."""
        self._session("loss_scalers")
        return [one for session in engine.scaling_sessions() for one in scalers_of(session)]

    @property
    def opt_properties(self) -> OptProperties:
        return OptProperties(self._session("opt_properties").properties)

    @property
    def handle(self) -> SessionHandle:
        """The handle; its `_deactivate()` removes the patches of torch's functions."""
        session = self._session("handle")
        return session.handle or SessionHandle(session)

    def _session(self, name: str) -> engine.Session:
        sessions = engine.open_sessions()
        if not sessions:
            raise AttributeError(f"_amp_state has no {name!r} before amp.initialize.", name=name)
        return sessions[-1]


_scalers: weakref.WeakKeyDictionary[engine.Session, dict[int, LossScaler]]
_scalers = weakref.WeakKeyDictionary()


def scalers_of(session: engine.Session) -> list[LossScaler]:
    """The scalers of a session as scripts see them: the same objects each time."""
    known = _scalers.setdefault(session, {})
    for loss_id in range(len(known), len(session.scalers)):
        known[loss_id] = LossScaler.of(session.scalers[loss_id], session)
    return list(known.values())


def scaler_in_use(session: engine.Session | None, loss_id: int) -> LossScaler | None:
    """A scaler of a session, if a script has asked for them."""
    return None if session is None else _scalers.get(session, {}).get(loss_id)


class OptProperties:
    """The settings of `initialize`, as attributes and as the dict `options`."""

    _NAMES = (
        *("enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
        *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
    )

    def __init__(self, properties: Any) -> None:
        self._properties = properties

    @property
    def options(self) -> dict[str, Any]:
        """apex's seven settings by name."""
        return {name: getattr(self._properties, name) for name in self._NAMES}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_properties":
            raise AttributeError(name)
        return getattr(self._properties, name)


class SessionHandle:
    """The handle of a session that `initialize` opened."""

    def __init__(self, session: engine.Session) -> None:
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

    def _clear_cache(self) -> None:
        self._session.drop_copies()


class Stash:
    """`optimizer._amp_stash`: its parameters, as apex sorted them.

    Weights are FP32 in the model at O2 too, so there are no masters beside them.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.lazy_init_called = False

    all_fp16_params = all_fp32_from_fp16_params = property(lambda self: [])

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters."""
        return [param for group in self._optimizer.param_groups for param in group["params"]]


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print a message, at verbosity above 0."""
    if _amp_state.verbosity > 0:
        print(message)


_amp_state = AmpState()
