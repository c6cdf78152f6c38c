"""`initialize`, and what undoes, changes or watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config import environment
from ..config.opt_levels import ARGUMENTS, Properties, properties_for
from ..config.overrides import Overrides, parse
from ..config.scale_settings import ScaleSettings
from ..errors import AmpatchError
from ..log import logger, set_verbosity
from ..session.session import Session, registry
from ..session.transfer import Handover
from . import argument_checks


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: Any = "O1",
    cast_model_type: torch.dtype | str | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = ScaleSettings.max_loss_scale,
    *,
    dtype: torch.dtype | str = torch.float16,
    overrides: dict | None = None,
    init_scale: float = ScaleSettings.init_scale,
    growth_interval: int = ScaleSettings.growth_interval,
    growth_factor: float = ScaleSettings.growth_factor,
    backoff_factor: float = ScaleSettings.backoff_factor,
    max_consecutive_skips: int = 50,
    allow_banned: bool = True,
    process_group: Any = None,
    patch_scope: str = "process",
    **unknown: Any,
) -> Any:
    """Make models and optimizers train in mixed precision.

    Args:
        models: a `torch.nn.Module`, or a list or tuple of them.  They are changed in
            place and returned, so references held elsewhere stay good.
        optimizers: an optimizer, or a list or tuple, or None.  At O2 their
            `param_groups` then hold the FP32 master weights.
        enabled: False makes this call, `scale_loss` and the rest do nothing.
        opt_level: `"O0"` FP32; `"O1"` torch's functions cast their arguments, weights
            stay FP32; `"O2"` the model in half with FP32 master weights in the optimizer;
            `"O3"` everything in half.  `"O4"` and `"O5"` are O1 and O2 in bfloat16.
        cast_model_type: dtype of weights and inputs, None as the level says, False for
            models that are left as they are.
        patch_torch_functions: whether torch's functions are patched, None as the level says.
        keep_batchnorm_fp32: whether BatchNorm and SyncBatchNorm stay in FP32 when the
            model is cast, None as the level says.
        master_weights: whether the optimizer works on FP32 copies of half weights, None as
            the level says.
        loss_scale: `"dynamic"`, or a positive number (a numeric string will do), None
            for the level's: dynamic for float16 at O1 and O2, else 1.0.
        cast_model_outputs: dtype of the models' floating outputs; None for FP32 at O0,
            O2 and O3 and for no cast at O1.
        num_losses: how many independent loss scalers (`loss_id` of `scale_loss`).
        verbosity: 0 silences the logger "ampatch".
        min_loss_scale, max_loss_scale: bounds of a dynamic loss scale; the floor is
            2**-24 unless given and never 0.
        dtype: the half type, `torch.float16` or `torch.bfloat16`, on every device.
        overrides: precision by module path (globs), module class or function, such as
            `{"decoder.*": "float", nn.Softmax: "float", torch.bmm: "float"}`, at O1, O2
            and O3.  In a half model (O2, O3) an overridden module or function takes and
            gives the dtype around it, and computes in its own.  No effect at O0.
        init_scale, growth_interval, growth_factor, backoff_factor: of the dynamic loss
            scale, with `torch.amp.GradScaler`'s meaning.
        max_consecutive_skips: after so many skipped steps in a row one error is logged
            that names parameters, the scale's history and what to try.  Fused optimizers
            skip and count on the device; what they count arrives without a wait, on an
            accelerator up to about a quarter of this number later.
        allow_banned: whether a function unsafe in half (binary_cross_entropy) runs in FP32
            with a warning (True) or is refused (False).
        process_group: ranks that share their gradients' overflow flag.
        patch_scope: `"process"` casts every call while the session is open, `"model"`
            those in a managed model's forward or on its parameters or half tensors.

    Called again on objects that are managed already it puts them under the new settings:
    weights and masters keep their FP32 values, optimizers their state.

    Returns:
        `models` if no optimizers were given, else `(models, optimizers)`: the very objects.

    Raises:
        TypeError, ValueError: for an argument that is wrong; it is named.
        AmpatchError: for a model wrapped in DistributedDataParallel too early, or sharded
            (FSDP) at another level than O1.
        In each case, and whatever else is raised, nothing has been changed; objects
        that an earlier call manages stay managed by it.

    The environment variables `AMPATCH_OPT_LEVEL`, `AMPATCH_DTYPE`, `AMPATCH_LOSS_SCALE`
    and `AMPATCH_ENABLED` (`0`) override the arguments of the same names, and
    `AMPATCH_SETTINGS`, a JSON object, those it names (`{"keep_batchnorm_fp32": false}`);
    `ValueError` names one that is wrong.
    """
    given = {name: value for name, value in locals().items() if name in ARGUMENTS}
    given["overrides"] = overrides
    argument_checks.unknown_keywords(initialize, unknown)
    set_verbosity(verbosity)
    opt_level, dtype, given = _from_environment(opt_level, dtype, given)
    overrides = given.pop("overrides")
    properties = properties_for(opt_level, dtype, **given)
    rules = parse(overrides)
    listed_models, listed_optimizers = (
        argument_checks.as_models(models),
        argument_checks.as_optimizers(optimizers),
    )
    if properties.enabled:
        _check(listed_models, listed_optimizers, properties, rules)
    if properties.opt_level == "O0" and any(rules):
        logger.info("O0 runs in FP32 throughout: overrides=... has no effect.")
        rules = parse(None)
    session = Session(
        properties,
        rules=rules,
        process_group=process_group,
        apex_flavour=registry.opens_as_apex,
    )
    with Handover(registry, listed_models, listed_optimizers):
        session.open(listed_models, listed_optimizers)
    registry.close_empty()
    registry.tell("on_initialize", properties)
    note = argument_checks.slow_half_note(listed_models, properties)
    if note is not None and properties.enabled:
        logger.warning(note)
    logger.info("Initialized: %s", properties)
    return models if optimizers is None else (models, optimizers)


def _from_environment(
    opt_level: Any, dtype: Any, given: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Let the environment replace level, dtype, loss scale, `enabled` and other settings.

    Settings that a script chose for its own opt level (`keep_batchnorm_fp32=True`
    for O2) may contradict the one asked for; they are dropped, and a warning says so.
    """
    asked = environment.read()
    given = {**given, "enabled": given["enabled"] if asked.enabled else False}
    if asked.loss_scale is not None:
        given["loss_scale"] = asked.loss_scale
    if asked.opt_level is not None and asked.opt_level != opt_level:
        given = _without_tied(given, opt_level, asked.opt_level)
    unknown = [name for name in asked.settings if name not in given]
    if unknown:
        raise ValueError(
            f"AMPATCH_SETTINGS: {', '.join(unknown)}: no such setting. Expected names among "
            f"{', '.join(given)}."
        )
    return asked.opt_level or opt_level, asked.dtype or dtype, {**given, **asked.settings}


def _without_tied(given: dict[str, Any], opt_level: Any, asked: str) -> dict[str, Any]:
    """`given` without what belongs to the script's own opt level; a warning names it."""
    tied = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights")
    dropped = [name for name in tied if given[name] is not None]
    if dropped:
        logger.warning(
            "AMPATCH_OPT_LEVEL=%s replaces opt_level=%r; these settings, given for that level, "
            "are ignored: %s.",
            asked,
            opt_level,
            ", ".join(dropped),
        )
    return {**given, **dict.fromkeys(tied)}


def _check(
    models: list[nn.Module], optimizers: list[Any], properties: Properties, rules: Overrides
) -> None:
    """Refuse what `initialize` cannot do with these models and optimizers."""
    argument_checks.optimizers_own_parameters(models, optimizers, registry.half_of)
    argument_checks.not_wrapped_before(models, properties)
    argument_checks.not_sharded(models, properties)
    argument_checks.weights_convert(models, properties)
    argument_checks.fused_steps_work(models, optimizers, properties)
    argument_checks.overridden_modules_exist(rules.modules, models)
    if rules.functions:
        argument_checks.overridden_functions_exist(rules.functions, registry.installation)


def set_opt_level(model: nn.Module, opt_level: Any) -> None:
    """Put a managed model under another opt level, now.

    Weights keep their FP32 values, optimizers their state.  Call it between
    steps.  Other models that were given to `initialize` with it keep their level, and
    dynamic loss scales that they need stay as they are.  Raises `AmpatchError` for a
    model that no open session manages, `ValueError` for a level in another half type
    than that of those other models.
    """
    session = registry.session_of_model(model)
    if session is None:
        raise AmpatchError(
            f"ampatch.set_opt_level({type(model).__name__}, {opt_level!r}): this "
            "model was not given to ampatch.initialize."
        )
    session.relevel(model, opt_level)


def unwrap(model: nn.Module) -> nn.Module:
    """A plain copy of a managed model: no hooks or patches, FP32 weights from the masters."""
    session = registry.session_of_model(model)
    if session is None:
        raise AmpatchError(
            f"ampatch.unwrap({type(model).__name__}): this model was not given to "
            "ampatch.initialize; copy.deepcopy does for a plain model."
        )
    return session.plain_copy(model)


def cache_info() -> Any:
    """Hits, misses and entries of the weight cache of the session opened last."""
    return registry.latest("ampatch.cache_info()").cache_info()


def deactivate() -> None:
    """Take everything out: torch, models and optimizers are as they were.

    Half weights get their masters' FP32 values.  Harmless when nothing is open.  What
    cannot be taken out does not keep the rest: its error is raised at the end, several as
    an `ExceptionGroup` (an `AmpatchError` that names them where Python has no groups).
    """
    try:
        registry.close_all()
    finally:
        registry.tell("on_deactivate")


def observe(observer: Any) -> Callable[[], None]:
    """Have an object told of what happens; returns a function that ends it.

    Its methods, each optional: `on_initialize(properties)`, `on_loss(loss, loss_id)`
    with the unscaled loss of each `scale_loss`, `on_scale(scale, loss_id)` with the scale it
    is then multiplied by (a float, or a tensor that changes in place later),
    `on_step(optimizer, skipped)` where
    `skipped` is a bool or a 0-dim tensor to read later, `on_metrics(values)`,
    `on_close(session)` and `on_deactivate()`.
    """
    return registry.observe(observer)


def log_metrics(**values: float) -> None:
    """Report numbers of the training (accuracy, ...) to whoever observes it: the sweep, say."""
    registry.tell("on_metrics", {name: float(value) for name, value in values.items()})
