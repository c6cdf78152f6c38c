"""The plan of one `initialize`: its settings, some replaced by the environment, all checked.

Making a plan changes nothing.  `argument_checks.check_objects` compares models and optimizers with
it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config import environment
from ..config.opt_levels import Properties, properties_for
from ..config.overrides import Overrides, parse
from ..log import LOG_ONCE, logger


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of one `initialize`.

    `overrides` are the user's overrides, and `active_overrides` those with an effect at this level.
    `replaced_settings` has the settings that the environment changes:
    `{name: (the script's value, the active value)}`.
    """

    properties: Properties
    overrides: Overrides
    active_overrides: Overrides
    replaced_settings: dict[str, tuple[Any, Any]]


def make_plan(settings: dict[str, Any]) -> Plan:
    """The plan for these arguments of `initialize`, by name.

    Raises `TypeError` or `ValueError` naming the argument.
    """
    replacing = environment.read()
    for message in environment.misspelt_messages():
        logger.warning(message, extra=LOG_ONCE)
    arguments = environment.replaced_arguments(settings, replacing)
    overrides = active_overrides = parse(arguments.pop("overrides"))
    properties = properties_for(**arguments)
    if properties.opt_level == "O0" and any(overrides):
        logger.info("O0 runs in FP32 throughout: overrides=... has no effect.")
        active_overrides = parse(None)
    if properties.keep_batchnorm_fp32 is False and properties.uses_half_copies:
        logger.info(
            "keep_batchnorm_fp32=False has no effect while weights stay FP32: BatchNorm accepts "
            "half inputs with FP32 weights and statistics. For half weights add "
            "master_weights=False."
        )
    replaced = environment.replaced_values(settings, replacing, properties) if replacing else {}
    return Plan(properties, overrides, active_overrides, replaced_settings=replaced)
