"""The session of a plugin: opened with a module, joined by optimizers, closed at the end."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import ampatch

from ...config.opt_levels import ARGUMENTS, HALF_TYPES, properties_for
from ...config.overrides import parse
from ...errors import UndoAll, did_you_mean
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
    """What a plugin manages: modules, the optimizers that came later, and their loss scales.

    One session of ampatch for each module, all with the same loss scales.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sessions: list[facade.Session] = []
        self._scales: dict[str, Any] = {}  # when nothing is open
        self._values: list[tuple[nn.Parameter, Tensor]] = []  # before they were rounded

    def open(self, module: nn.Module) -> None:
        """Manage a module; the loss scales go on where the plugin's last session ended."""
        values = [(parameter, parameter.data) for parameter in module.parameters()]
        ampatch.initialize(module, **self._settings.given)
        session = facade.open_sessions()[-1]
        before = self._open()
        if before:
            facade.share_loss_scales(session, before[0])
        elif self._scales:
            facade.load_loss_scales(session, self._scales)
        self._sessions = [*before, session]
        self._values += [(known, value) for known, value in values if known.dtype != value.dtype]

    def add(self, optimizers: Iterable[Any]) -> None:
        """Manage optimizers that have weights."""
        for optimizer in optimizers:
            if optimizer.param_groups:
                trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
                self._values = [known for known in self._values if id(known[0]) not in trained]
                ampatch.add_optimizers(optimizer)

    def hold(self, scheduler: Any) -> None:
        """Have a scheduler wait while steps are skipped, if steps can be."""
        if any(scaler.is_dynamic for session in self._open() for scaler in session.scalers):
            ampatch.hold_scheduler(scheduler)

    def scaled(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """`ampatch.scale_loss` for all optimizers: an overflow concerns those it is in."""
        optimizers = [one for session in self._open() for one in facade.optimizers_of(session)]
        return ampatch.scale_loss(loss, optimizers) if optimizers else nullcontext(loss)

    def as_weights(self, value: Tensor) -> Tensor:
        """A floating tensor in the dtype of the models' weights, where these are in half."""
        for session in self._open():
            half = session.properties.cast_model_type
            if half in HALF_TYPES and value.is_floating_point():
                return value.to(half)
        return value

    @property
    def scales(self) -> dict[str, Any]:
        """The loss scales, also when closed."""
        known = self._open()
        return facade.loss_scales(known[0]) if known else self._scales

    @scales.setter
    def scales(self, scales: dict[str, Any]) -> None:
        self._scales = scales
        for session in self._open()[:1]:
            facade.load_loss_scales(session, scales)

    def close(self) -> None:
        """Modules and optimizers are plain again.  Harmless when closed."""
        self._scales = self.scales
        known, self._sessions = self._open(), []
        values, self._values = self._values, []
        rounded = [(parameter, parameter.detach().clone(), value) for parameter, value in values]
        undo = UndoAll("ampatch.integrations.lightning: the plugin's teardown")
        for session in known:
            undo.do(session.close)
        for parameter, half, value in rounded:
            if torch.equal(half, value.to(half)):  # nobody has written into it
                parameter.data.copy_(value)
        undo.end()

    def _open(self) -> list[facade.Session]:
        return [session for session in self._sessions if session.is_open]
