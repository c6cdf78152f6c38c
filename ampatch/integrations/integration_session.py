"""The session of an integration: its models, its optimizers and their loss scales."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampatch

from ..config.opt_levels import HALF_DTYPES, SETTING_ARGUMENTS, properties_for
from ..config.overrides import parse
from ..errors import did_you_mean
from ..log import logger
from ..session import facade

SETTINGS = frozenset(
    name
    for name, parameter in inspect.signature(ampatch.initialize).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
) - {"models", "optimizers", "num_losses"}
"""The arguments of `ampatch.initialize` that an integration takes."""


def check_settings(
    function_name: str, arguments: dict[str, Any], of_framework: Collection[str] = ()
) -> dict[str, Any]:
    """Return the settings of `initialize` among the arguments; the others are the framework's.

    Raises `TypeError` for an unknown and `ValueError` for a wrong setting, and changes nothing.
    """
    for name in arguments:
        if name not in SETTINGS and name not in of_framework:
            hint = (
                did_you_mean(name, {*SETTINGS, *of_framework}) or f" Known: {', '.join(SETTINGS)}."
            )
            raise TypeError(f"{function_name}() got an unknown setting {name!r}.{hint}")
    settings = {name: value for name, value in arguments.items() if name in SETTINGS}
    properties_for(
        settings["opt_level"],
        settings.get("dtype", torch.float16),
        **{name: value for name, value in settings.items() if name in SETTING_ARGUMENTS},
    )
    parse(settings.get("overrides"))
    return settings


class IntegrationSession:
    """One session, opened with the first model; other models and optimizers are added."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._last: facade.Session | None = None
        # Loaded from a checkpoint, or the scales of the last session.
        self._scales: dict[str, Any] = {}

    def open(self, *models: nn.Module) -> None:
        """Manage models, in the open session or in a new one.

        A new session begins with the loaded loss scales, or with the scales of the last session.
        """
        session = self.session
        new_models = [m for m in models if session is None or facade.session_of(m) is not session]
        if not new_models:
            return
        if session is None:
            ampatch.initialize(new_models, **self.settings)
            self._last = facade.open_sessions()[-1]
            self.scales = self._scales
        elif session.properties.enabled:
            for model in new_models:
                facade.release_model(model)  # it may belong to an earlier session
            ampatch.add_models(new_models, to=self._member())

    def add(self, optimizers: Iterable[Any]) -> None:
        """Manage optimizers that have parameters."""
        for optimizer in optimizers:
            if optimizer.param_groups:
                ampatch.add_optimizers(optimizer)

    def checks_for_overflow(self) -> bool:
        """Whether a loss scale is dynamic."""
        session = self.session
        return session is not None and session.checks_for_overflow()

    def scaled(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """`ampatch.scale_loss` for all optimizers; only those whose gradients overflow skip."""
        session = self.session
        optimizers = [] if session is None else [m.optimizer for m in session.optimizers]
        return ampatch.scale_loss(loss, optimizers) if optimizers else nullcontext(loss)

    def cast_to_weight_dtype(self, value: Tensor) -> Tensor:
        """Cast a floating tensor to the dtype of the weights at O3; return others unchanged."""
        session = self.session
        if session is None or session.properties.uses_half_copies:
            return value
        half = session.properties.cast_model_type
        return value.to(half) if half in HALF_DTYPES and value.is_floating_point() else value

    @property
    def scales(self) -> dict[str, Any]:
        """The loss scales, also after `close`; empty if ampatch is disabled."""
        member = self._member()
        return self._scales if member is None else ampatch.state_dict(of=member)

    @scales.setter
    def scales(self, scales: dict[str, Any]) -> None:
        self._scales = scales
        member = self._member()
        if scales and member is not None:
            ampatch.load_state_dict(scales, of=member)

    def restore(self, folder: str, scale_file: str, grad_scaler_file: str) -> None:
        """Load the loss scale of a checkpoint, saved by ampatch or by torch's GradScaler."""
        own_file, torch_file = Path(folder, scale_file), Path(folder, grad_scaler_file)
        if own_file.suffix == ".json" and own_file.is_file():
            self.scales = json.loads(own_file.read_text())
        elif file := next(filter(Path.is_file, (own_file, torch_file)), None):
            self.scales = torch.load(file, weights_only=True)
        elif any(entry.get("dynamic", True) for entry in self.scales.values()):
            logger.warning(
                "%s: this checkpoint has no loss scale (%s): the current scale stays.",
                folder,
                scale_file,
            )

    def close(self) -> None:
        """Release the models and optimizers.  Does nothing if the session is closed."""
        self._scales = self.scales
        last, self._last = self._last, None
        if last is not None and last.is_open:
            last.close()

    @property
    def session(self) -> facade.Session | None:
        """The open session, or None if it is closed or its models and optimizers are gone."""
        last = self._last
        return last if last is not None and last.is_open and last.is_alive() else None

    def _member(self) -> Any:
        """A model or an optimizer of the session, or None."""
        session = self.session
        if session is None:
            return None
        models = [managed.model for managed in session.models]
        return next(iter([*models, *(managed.optimizer for managed in session.optimizers)]), None)
