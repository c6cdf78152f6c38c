"""Which of a script's settings the environment replaces by others."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config.environment import Asked
from ..config.opt_levels import Properties, properties_for


def replaced(
    asked: Asked, opt_level: Any, dtype: Any, given: dict[str, Any], in_force: Properties
) -> dict[str, tuple[Any, Any]]:
    """`(the script's, the one in force)` by name, for what the environment asks and changes.

    `opt_level`, `dtype` and `given` are the script's own arguments.  Values are compared as
    they take effect: `loss_scale=None` at O1 is "dynamic", and O0 has no half type.
    """
    names = [
        name
        for name in ("opt_level", "dtype", "loss_scale")
        if getattr(asked, name) is not None and not (name == "dtype" and _is_fp32(in_force))
    ]
    names += [] if asked.enabled else ["enabled"]
    own = _own(opt_level, dtype, given)
    names += [name for name in asked.settings if name in own]
    pairs = {name: (own[name], getattr(in_force, name)) for name in names}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _own(opt_level: Any, dtype: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The script's own settings as they would take effect, or as written if they are refused."""
    try:
        return dataclasses.asdict(properties_for(opt_level, dtype, **given))
    except (TypeError, ValueError):  # no error of this training: others are in force
        return {"opt_level": opt_level, "dtype": dtype, **given}


def _is_fp32(properties: Properties) -> bool:
    return properties.opt_level == "O0"
