"""The environment variables, and how they are read.

These replace arguments that a script passes to `initialize`:

| variable | replaces |
|---|---|
| `AMPATCH_OPT_LEVEL` | `opt_level` |
| `AMPATCH_DTYPE` | `dtype` |
| `AMPATCH_LOSS_SCALE` | `loss_scale` |
| `AMPATCH_OVERRIDES` | `overrides`, with a JSON file or JSON text: `{"decoder.*": "float"}` |
| `AMPATCH_ENABLED` | `enabled`, if the variable is `0` |
| `AMPATCH_SETTINGS` | the settings that a JSON object names: `{"growth_interval": 500}` |

These hold for the process:

| variable | means |
|---|---|
| `AMPATCH_NATIVE` | `0`: no native part; `1`: a message says why it is missing, if it is |
| `AMPATCH_CACHE` | the folder of built files; otherwise `XDG_CACHE_HOME`, or `~/.cache` |

An empty variable is treated as not set.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import did_you_mean
from ..log import logger
from .opt_levels import (
    LEVELS_IN_WORDS,
    MODEL_SETTINGS,
    SETTING_ARGUMENTS,
    Properties,
    did_you_mean_level,
    half_dtype,
    level_name,
    loss_scale_value,
    properties_for,
)
from .overrides import PRECISIONS
from .overrides import read as read_overrides
from .validation import known_word

PROCESS_VARIABLES = ("AMPATCH_NATIVE", "AMPATCH_CACHE")
TRIAL_VARIABLES = ("AMPATCH_SEED", "AMPATCH_TRIAL_DIR")  # set by a sweep, for the script


def read(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Values for the arguments of `initialize` that the variables replace, by name.

    Raises a `ValueError` that names a wrong variable.
    """
    native_setting(environment)
    values = {
        argument: parse(variable, text)
        for variable, (argument, parse) in _READERS.items()
        if (text := environment.get(variable, "")).strip()
    }
    settings = values.pop("settings", {})
    if values.get("enabled"):
        del values["enabled"]  # 1 leaves it to the script
    return {**values, **settings}


def misspelt_messages(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A message for each variable whose name looks like a misspelt variable of ampatch."""
    known = (*VARIABLES, *PROCESS_VARIABLES, *TRIAL_VARIABLES)
    others = (name for name in environment if name not in known and name[:1] in "Aa")
    hints = {name: did_you_mean(name.upper(), known, 0.8) for name in others}
    return [
        f"The environment has {name}, which means nothing to ampatch.{hint}"
        for name, hint in hints.items()
        if hint
    ]


def replaced_arguments(script: dict[str, Any], replacing: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a script, some replaced with the values that `read` has returned.

    If the opt level is replaced, settings that the script chose for its own level
    (`keep_batchnorm_fp32=True` for O2) might contradict the new level: they are dropped, with a
    warning.
    """
    level = replacing.get("opt_level", script["opt_level"])
    reset = dict.fromkeys(MODEL_SETTINGS if level != script["opt_level"] else ())
    dropped = [name for name in reset if script[name] is not None]
    if dropped:
        logger.warning(
            "AMPATCH_OPT_LEVEL=%s replaces opt_level=%r; these settings, given for that level, "
            "are ignored: %s.",
            level,
            script["opt_level"],
            ", ".join(dropped),
        )
    return {**script, **reset, **replacing}


def replaced_values(
    script: dict[str, Any], replacing: dict[str, Any], active: Properties
) -> dict[str, tuple[Any, Any]]:
    """`(the script's value, the active one)` by name, for replaced arguments that differ.

    None is compared as the value that it stands for: `loss_scale=None` at O1 is "dynamic".
    """
    before = dict(script)
    settings = {name: script[name] for name in script if name != "overrides"}
    with contextlib.suppress(TypeError, ValueError):  # the script's own values may be wrong
        before |= vars(properties_for(**settings))
    after = {**replacing, **vars(active)}
    return {name: (before[name], after[name]) for name in replacing if before[name] != after[name]}


def native_setting(environment: Mapping[str, str] = os.environ) -> bool | None:
    """`AMPATCH_NATIVE` as a bool, or None if it is not set."""
    text = environment.get("AMPATCH_NATIVE", "")
    return _checked_truth_value("AMPATCH_NATIVE", text) if text.strip() else None


def cache_folder(environment: Mapping[str, str] = os.environ) -> str:
    """The folder for files that ampatch builds; it may not exist."""
    chosen = environment.get("AMPATCH_CACHE", "")
    default = environment.get("XDG_CACHE_HOME", "") or os.path.join("~", ".cache")
    return os.path.join(os.path.abspath(os.path.expanduser(chosen or default)), "ampatch")


def opt_level(name: str, text: str) -> str:
    """`"O0"` to `"O5"` from the text of `name`, a variable or an option."""
    return _checked_value(name, text, level_name, LEVELS_IN_WORDS, did_you_mean_level(text.strip()))


def dtype(name: str, text: str) -> torch.dtype:
    """The half dtype from the text of `name`."""
    return _checked_value(name, text, half_dtype, "float16 or bfloat16; for FP32 use opt level O0")


def loss_scale(name: str, text: str) -> str | float:
    """`"dynamic"` or a number from the text of `name`."""
    check = functools.partial(loss_scale_value, name)
    return _checked_value(
        name, text, check, '"dynamic" or a positive number, such as 128, that FP32 can invert'
    )


def overrides(name: str, text: str) -> dict[str, str]:
    """The overrides in the JSON file or JSON text that is the text of `name`."""
    globs = read_overrides(f"{name}={text}", text)
    for glob, precision in globs.items():
        known_word(f"{name}={text}: {glob!r}", precision, PRECISIONS)
    return globs


def _checked_truth_value(name: str, text: str) -> bool:
    if text.strip().lower() in ("0", "false"):
        return False
    if text.strip().lower() in ("1", "true"):
        return True
    raise ValueError(f"{name}={text}: expected 0 (off) or 1.")


def _settings(name: str, text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except json.JSONDecodeError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{name}={text}: not understood. Expected a JSON object.")
    known = [*SETTING_ARGUMENTS, "overrides"]
    if unknown := [key for key in settings if key not in known]:
        raise ValueError(
            f"{name}: {', '.join(unknown)}: no such setting. Expected names among "
            f"{', '.join(known)}."
        )
    return settings


def _checked_value(name: str, text: str, check: Any, expected: str, hint: str = "") -> Any:
    try:
        return check(text.strip())
    except ValueError:
        raise ValueError(f"{name}={text}: not understood. Expected {expected}.{hint}") from None


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "AMPATCH_OPT_LEVEL": ("opt_level", opt_level),
    "AMPATCH_DTYPE": ("dtype", dtype),
    "AMPATCH_LOSS_SCALE": ("loss_scale", loss_scale),
    "AMPATCH_OVERRIDES": ("overrides", overrides),
    "AMPATCH_ENABLED": ("enabled", _checked_truth_value),
    "AMPATCH_SETTINGS": ("settings", _settings),
}
VARIABLES = tuple(_READERS)
"""The variables that replace arguments."""
