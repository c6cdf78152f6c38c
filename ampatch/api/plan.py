"""The plan of one `initialize`: its arguments, those that the environment replaces, all checked.

Nothing is changed while the plan is made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ..config import environment
from ..config.opt_levels import Properties, properties_for
from ..config.overrides import Overrides, parse
from ..log import logger
from . import argument_checks


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings and objects of one `initialize`.

    `replaced` has the settings that the environment has changed, as `{name: (the script's value,
    the one in force)}`.
    """

    properties: Properties
    rules: Overrides
    models: list[nn.Module]
    optimizers: list[Any]
    process_group: Any
    replaced: dict[str, tuple[Any, Any]]


def plan_of(models: Any, optimizers: Any, process_group: Any, settings: dict[str, Any]) -> Plan:
    """The plan for these arguments of `initialize`; `settings` are the other ones, by name.

    Raises what `initialize` raises.
    """
    replacing = environment.read()
    in_force = environment.replace_arguments(settings, replacing)
    rules = parse(in_force.pop("overrides"))
    properties = properties_for(**in_force)
    listed_models = argument_checks.as_models(models)
    listed_optimizers = [] if optimizers is None else argument_checks.as_optimizers(optimizers)
    argument_checks.is_process_group(process_group)
    if properties.enabled:
        argument_checks.models_can_change(listed_models, properties)
        argument_checks.optimizers_can_train(
            listed_optimizers, listed_models, properties, process_group
        )
        if any(rules):
            argument_checks.overridden_exist(
                rules, listed_models, properties, "overrides" in replacing
            )
    if properties.opt_level == "O0" and any(rules):
        logger.info("O0 runs in FP32 throughout: overrides=... has no effect.")
        rules = parse(None)
    if properties.keep_batchnorm_fp32 is False and properties.lends_weights:
        logger.info(
            "keep_batchnorm_fp32=False has no effect where weights stay FP32: BatchNorm takes half "
            "inputs beside FP32 weights and statistics. For half ones add master_weights=False."
        )
    replaced = environment.effects(settings, replacing, properties) if replacing else {}
    return Plan(properties, rules, listed_models, listed_optimizers, process_group, replaced)
