"""Defaults that signatures name, as the numbers they are: mkdocstrings reads source alone."""

from __future__ import annotations

from typing import Any

import griffe

from ampatch.config.scale_settings import ScaleSettings
from ampatch.sweep.plan import ROUNDS

NUMBERS = {f"ScaleSettings.{name}": value for name, value in vars(ScaleSettings()).items()}
NUMBERS["ROUNDS"] = ROUNDS


class Defaults(griffe.Extension):
    """Writes `init_scale: float = 65536.0` for `init_scale: float = ScaleSettings.init_scale`."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            default = str(parameter.default)
            if default in NUMBERS:
                parameter.default = repr(NUMBERS[default])
