"""Defaults that a signature takes from `ScaleSettings`, as numbers: mkdocstrings reads source alone."""

from __future__ import annotations

from typing import Any

import griffe

from ampatch.config.scale_settings import ScaleSettings

OWNER = "ScaleSettings."


class Defaults(griffe.Extension):
    """Writes `init_scale: float = 65536.0` in place of `init_scale: float = ScaleSettings.init_scale`."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            default = str(parameter.default)
            if default.startswith(OWNER):
                parameter.default = repr(getattr(ScaleSettings, default.removeprefix(OWNER)))
