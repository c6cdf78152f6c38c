"""apex.amp._amp_state: apex's private state for scripts that read and write it.

Everything here is a view of the session opened last.  Attributes that apex sets in
`initialize` are missing before it, so `hasattr` returns what it returns with apex.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...session import facade as engine

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
        return [LossScaler(scaler) for scaler in self._session("loss_scalers").scalers]

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


class LossScaler:
    """A loss scaler under apex's names."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def loss_scale(self) -> float:
        return self._scaler.get()

    @property
    def _loss_scale(self) -> float:
        return self._scaler.get()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._scaler.set(float(value))

    @property
    def _unskipped(self) -> int:
        return self._scaler.state_dict()["unskipped"]

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._scaler.load_state_dict({"loss_scale": self._scaler.get(), "unskipped": value})

    @property
    def dynamic(self) -> bool:
        return self._scaler.is_dynamic

    _scale_seq_len = _setting("growth_interval", 2000, int)
    _max_loss_scale = _setting("max_loss_scale", 2.0**24, float)
    _min_loss_scale = _setting("min_loss_scale", None, float)


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
