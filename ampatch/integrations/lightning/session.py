"""The session of a plugin: opened with a module, joined by optimizers, closed at the end."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

import ampatch

from ...config.opt_levels import ARGUMENTS, HALF_TYPES, properties_for
from ...config.overrides import parse
from ...errors import did_you_mean
from ...session import facade


class Settings:
    """The arguments of `ampatch.initialize`, checked when the plugin is made."""

    def __init__(self, plugin: str, given: dict[str, Any]) -> None:
        known = [
            name
            for name, parameter in inspect.signature(ampatch.initialize).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
            and name not in ("models", "optimizers", "num_losses")
        ]
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or f" Known are: {', '.join(known)}."
                raise TypeError(f"{plugin}() got an unknown setting {name!r}.{hint}")
        properties_for(
            given["opt_level"],
            given["dtype"],
            **{name: value for name, value in given.items() if name in ARGUMENTS},
        )
        parse(given.get("overrides"))
        self.given = given

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.given.items())


class PluginSession:
    """What a plugin manages: modules, the optimizers that came later, and their loss scales."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last: facade.Session | None = None
        self._scales: dict[str, Any] = {}  # when nothing is open

    def open(self, module: nn.Module) -> None:
        """Manage a module, beside those that are open or as the first.

        The loss scales of the first are those that were loaded, or of the plugin's last session.
        """
        session = self._session()
        if session is not None and facade.session_of(module) is not session:
            facade.release_model(module)  # an earlier plugin had it
        if session is None:
            ampatch.initialize(module, **self._settings.given)
            self._last = facade.open_sessions()[-1]
            self.scales = self._scales
        elif session.properties.enabled:
            ampatch.add_models(module, to=self._member())

    def add(self, optimizers: Iterable[Any]) -> None:
        """Manage optimizers that have weights."""
        for optimizer in optimizers:
            if optimizer.param_groups:
                ampatch.add_optimizers(optimizer)

    def looks_for_overflow(self) -> bool:
        """Whether there is a dynamic loss scale."""
        session = self._session()
        return session is not None and session.looks_for_overflow()

    def scaled(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """`ampatch.scale_loss` for all optimizers: an overflow concerns those it is in."""
        session = self._session()
        optimizers = [] if session is None else [one.optimizer for one in session.optimizers]
        return ampatch.scale_loss(loss, optimizers) if optimizers else nullcontext(loss)

    def as_weights(self, value: Tensor) -> Tensor:
        """A floating tensor in the dtype of the models' weights, where these are in half."""
        session = self._session()
        if session is None or session.properties.lends_weights:
            return value
        half = session.properties.cast_model_type
        return value.to(half) if half in HALF_TYPES and value.is_floating_point() else value

    @property
    def scales(self) -> dict[str, Any]:
        """The loss scales, also when closed; none where ampatch is disabled."""
        member = self._member()
        return self._scales if member is None else ampatch.state_dict(of=member)

    @scales.setter
    def scales(self, scales: dict[str, Any]) -> None:
        self._scales = scales
        member = self._member()
        if scales and member is not None:
            ampatch.load_state_dict(scales, of=member)

    def close(self) -> None:
        """Modules and optimizers are plain again.  Harmless when closed."""
        self._scales = self.scales
        last, self._last = self._last, None
        if last is not None and last.is_open:
            last.close()

    def _session(self) -> facade.Session | None:
        """The open session; None where its modules and optimizers are closed or gone."""
        last = self._last
        return last if last is not None and last.is_open and last.is_alive() else None

    def _member(self) -> Any:
        """A module or optimizer by which ampatch knows the session; None: it manages nothing."""
        session = self._session()
        if session is None:
            return None
        models = [managed.model for managed in session.models]
        return next(iter([*models, *(one.optimizer for one in session.optimizers)]), None)
