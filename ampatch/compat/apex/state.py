"""apex.amp._amp_state: apex's private state for scripts that read and write it.

`loss_scalers` are those of all sessions that have an optimizer, in the order of `initialize`, as
apex has one list of them; all else is a view of the session opened last.  Attributes that apex
sets in `initialize` are missing before it, so `hasattr` returns what it returns with apex.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ...session import facade as engine
from .scaler import Unscaling

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
        return [view for session in engine.scaling_sessions() for view in views_of(session)]

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


def _setting(name: str, default: Any, kind: type) -> Any:
    """A setting of a dynamic scaler under apex's name; a static one has none to change."""

    def written(scaler: LossScaler, value: Any) -> None:
        if scaler.dynamic:
            scaler._scaler.change("loss scaler", {name: kind(value)})

    return property(lambda scaler: getattr(scaler._scaler.settings, name, default), written)


class LossScaler(Unscaling):
    """The loss scaler of a session under apex's names.

    After blocks with `delay_overflow_check=True` a script calls `update_scale()`, which alone moves
    the scale then, and the next step is taken as it is.  It goes by `_overflow_buf` (int, one
    element, not 0 for an overflow): the script's own if it has put one there, else what the
    blocks have found.  A script may replace `update_scale` too: see `amp.scale_loss`.
    """

    def __init__(self, scaler: engine.Scaler, session: engine.Session) -> None:
        self._scaler = scaler
        self._session = weakref.ref(session)
        self._own_buffer: Tensor | None = None
        self._given_buffer: Tensor | None = None  # by the script
        self._was_told = False  # by the script, or by `update_scale`, of an overflow
        self._count = (0, -1)  # of clean steps as the script set it, at which generation

    # The scale

    def loss_scale(self) -> float:
        """The scale.  Waits for the device."""
        return self._scaler.get()

    @property
    def _loss_scale(self) -> float:
        return self._scaler.get()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._scaler.set(float(value))

    @property
    def _unskipped(self) -> int:
        count, generation = self._count
        if generation == self._scaler.generation:
            return count
        return self._scaler.state_dict()["unskipped"]

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        """The scaler counts to below the interval; a script that counts by itself reaches it."""
        self._scaler.load_state_dict({"loss_scale": self._scaler.get(), "unskipped": value})
        self._count = (value, self._scaler.generation)

    @property
    def dynamic(self) -> bool:
        return self._scaler.is_dynamic

    _scale_seq_len = _setting("growth_interval", 2000, int)
    _max_loss_scale = _setting("max_loss_scale", 2.0**24, float)
    _min_loss_scale = _setting("min_loss_scale", None, float)

    # Overflow

    @property
    def _has_overflow(self) -> bool:
        return self._was_told or (self._given_buffer is None and self._blocks_overflowed())

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._was_told = bool(value)
        if not value and self.dynamic:
            self._scaler.forget_overflow()

    @property
    def _overflow_buf(self) -> Tensor:
        if self._given_buffer is not None:
            return self._given_buffer
        if self._own_buffer is None:
            self._own_buffer = torch.zeros(1, dtype=torch.int)
        if self._blocks_overflowed():
            self._own_buffer.fill_(1)
        return self._own_buffer

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self._given_buffer = None if value is self._own_buffer else value

    def _blocks_overflowed(self) -> bool:
        return self.dynamic and self._scaler.has_overflow()

    def begin_block(self) -> None:
        """A `scale_loss` block begins: as in apex, it notes its overflow anew."""
        self._was_told = False
        for buffer in (self._own_buffer, self._given_buffer):
            if buffer is not None:
                buffer.zero_()

    def update_scale(self) -> bool:
        """React to one step; returns whether the script is to leave it out.  Waits."""
        session = self._session()
        if not self.dynamic or session is None:
            return False
        self._was_told = self._has_overflow or bool(self._overflow_buf.item())
        engine.drop_findings(session, self._scaler)
        self._scaler.update([self._was_told])
        return self._was_told

    def decide(self) -> None:
        """Have `update_scale`, which the script has replaced, say whether to skip the next step."""
        session = self._session()
        if not self.dynamic or session is None:
            return
        waiting = engine.drop_findings(session, self._scaler)
        skips = bool(self.update_scale())
        self._scaler.update([])  # has been done by the script
        for gradients in waiting:
            gradients.note(skips, self._scaler)


_views: weakref.WeakKeyDictionary[engine.Session, dict[int, LossScaler]]
_views = weakref.WeakKeyDictionary()


def views_of(session: engine.Session) -> list[LossScaler]:
    """The scalers of a session as scripts see them: the same objects each time."""
    known = _views.setdefault(session, {})
    for loss_id in range(len(known), len(session.scalers)):
        known[loss_id] = LossScaler(session.scalers[loss_id], session)
    return list(known.values())


def view_in_use(session: engine.Session | None, loss_id: int) -> LossScaler | None:
    """The scaler of a session, if a script has asked for the scalers."""
    return _views.get(session, {}).get(loss_id) if session is not None else None


class OptProperties:
    """The settings of `initialize`, as attributes and as the dict `options`."""

    _NAMES = (
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
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

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """Half parameters that have masters: none."""
        return []

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their FP32 masters, in the same order: none."""
        return []

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters."""
        return [param for group in self._optimizer.param_groups for param in group["params"]]


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print a message, at verbosity above 0."""
    if _amp_state.verbosity > 0:
        print(message)


def master_params(optimizer: Any) -> Any:
    """The tensors that `optimizer.step` updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


_amp_state = AmpState()
