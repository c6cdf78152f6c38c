"""The public functions around a training: `initialize`, `scale_loss` and their kin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, overrides as override_rules
from .errors import AmpatchError
from .log import logger, set_verbosity
from .opt_levels import level_name, loss_scale_value, resolve
from .session import Session, registry


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: Any = "O1",
    cast_model_type: torch.dtype | str | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: torch.dtype | str = torch.float16,
    overrides: dict | None = None,
    init_scale: float = 2.0**16,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
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
        cast_model_type: dtype of weights and inputs, None as the level says.
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
            `{"decoder.*": "float", nn.Softmax: "float", torch.bmm: "float"}`.
        init_scale, growth_interval, growth_factor, backoff_factor: of the dynamic loss
            scale, with `torch.amp.GradScaler`'s meaning.
        max_consecutive_skips: after so many skipped steps in a row, and each multiple,
            one error is logged that names parameters and what to try.  Fused optimizers
            skip on the device, where nobody counts.
        allow_banned: whether a function unsafe in half (binary_cross_entropy) runs in FP32
            with a warning (True) or is refused (False).
        process_group: ranks that share their gradients' overflow flag.
        patch_scope: `"process"` casts every call while the session is open, `"model"`
            those in a managed model's forward or on its parameters or half tensors.

    Returns:
        `models` if no optimizers were given, else `(models, optimizers)`: the very objects.

    Raises:
        TypeError, ValueError: for an argument that is wrong; it is named.
        AmpatchError: for a model wrapped in DistributedDataParallel too early.
        In each case nothing has been changed.

    The environment variables `AMPATCH_OPT_LEVEL`, `AMPATCH_DTYPE` and
    `AMPATCH_ENABLED` (`0`) override the arguments of the same names.
    """
    checks.unknown_keywords(initialize, unknown)
    given = {
        "enabled": enabled,
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
        "num_losses": num_losses,
        "verbosity": verbosity,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": max_loss_scale,
        "init_scale": init_scale,
        "growth_interval": growth_interval,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "max_consecutive_skips": max_consecutive_skips,
        "allow_banned": allow_banned,
        "patch_scope": patch_scope,
    }
    set_verbosity(verbosity)
    opt_level, dtype, given = _from_environment(opt_level, dtype, given)
    properties = resolve(opt_level, dtype, **given)
    rules = override_rules.split(overrides)
    listed_models, listed_optimizers = checks.as_models(models), checks.as_optimizers(optimizers)
    if properties.enabled:
        _check(listed_models, listed_optimizers, properties, rules)
        _release(listed_models, listed_optimizers)
    session = Session(properties, rules=rules, process_group=process_group)
    session.open(listed_models, listed_optimizers)
    registry.tell("on_initialize", properties)
    note = checks.slow_half_note(listed_models, properties)
    if note is not None and properties.enabled:
        logger.warning(note)
    logger.info("Initialized: %s", properties)
    return models if optimizers is None else (models, optimizers)


def _from_environment(opt_level: Any, dtype: Any, given: dict) -> tuple[Any, Any, dict]:
    """Let the environment override level, dtype and `enabled`.

    Settings that a script chose for its own opt level (`keep_batchnorm_fp32=True`
    for O2) may contradict the one asked for; they give way, and it is said.
    """
    if os.environ.get("AMPATCH_ENABLED", "").lower() in ("0", "false"):
        given = {**given, "enabled": False}
    asked = os.environ.get("AMPATCH_OPT_LEVEL")
    dtype = os.environ.get("AMPATCH_DTYPE") or dtype
    if not asked:
        return opt_level, dtype, given
    if level_name(asked) != opt_level:
        tied = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights")
        dropped = [name for name in tied if given[name] is not None]
        if dropped:
            logger.warning(
                "AMPATCH_OPT_LEVEL=%s replaces opt_level=%r; what was given for that "
                "level gives way: %s.",
                asked,
                opt_level,
                ", ".join(dropped),
            )
        given = {name: None if name in tied else value for name, value in given.items()}
    return asked, dtype, given


def _check(
    models: list[nn.Module], optimizers: list[Any], properties: Any, rules: tuple[list, dict]
) -> None:
    checks.optimizers_own_parameters(models, optimizers, registry.half_of)
    checks.not_wrapped_before(models, properties)
    override_rules.check_all_used(rules[0], models)
    if rules[1]:
        registry.check_functions(rules[1], properties)


def _release(models: list[nn.Module], optimizers: list[Any]) -> None:
    """A second `initialize` on an object takes it out of the first; FP32 values carry over."""
    for model in models:
        session = registry.session_of_model(model)
        if session is not None:
            session.release_model(model)
    for optimizer in optimizers:
        session = registry.session_of(optimizer)
        if session is not None:
            session.release_optimizer(optimizer)
    registry.close_empty()


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients after it.

        with ampatch.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    After the block the gradients in the optimizers' `param_groups` are FP32
    and unscaled, added to what was there before.  If they hold an inf or NaN
    under a dynamic loss scale, the next `optimizer.step()` does nothing.

    Args:
        loss: floating tensor, usually 0-dim; the yielded loss is FP32.
        optimizers: those whose parameters the loss reaches: one, or a list or tuple.
        loss_id: which loss scaler, `0 <= loss_id < num_losses`.
        model: not needed; accepted because apex had it.
        delay_unscale: leave the gradients scaled, to add those of another loss first.
        delay_overflow_check: let the loss scale react only with the next check.

    Raises:
        TypeError: `loss` is no floating tensor.
        ValueError: `loss_id` is out of range.
        AmpatchError: `initialize` was not called, or not with these optimizers.
    """
    checks.a_loss(loss)
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    session = registry.latest("ampatch.scale_loss(...)")
    for index, optimizer in enumerate(listed):
        found = registry.session_of(optimizer)
        if found is None:
            where = (
                f"optimizers[{index}]" if isinstance(optimizers, (list, tuple)) else "optimizers"
            )
            raise AmpatchError(
                f"ampatch.scale_loss({where}=<{type(optimizer).__name__}>): this optimizer was "
                "not given to ampatch.initialize. Pass the optimizer that initialize returned."
            )
        session = found
    checks.loss_number(loss_id, len(session.scalers), "ampatch.scale_loss")
    if not session.properties.enabled:
        return contextlib.nullcontext(loss)
    managed = [registry.managed(optimizer) for optimizer in listed]
    return session.scaled_backward(
        loss,
        list({id(one): one for one in managed}.values()),
        loss_id,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    )


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that `optimizer.step` updates: the FP32 masters at O2, else the parameters.

    For clipping: `clip_grad_norm_(ampatch.master_params(optimizer), max_norm)`.
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict() -> dict[str, dict[str, Any]]:
    """The loss scalers of the session opened last, in apex's format.

    `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`.  Waits for the device.
    """
    session = registry.latest("ampatch.state_dict()")
    return {
        f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(session.scalers)
    }


def load_state_dict(state: dict[str, dict[str, Any]]) -> None:
    """Restore the loss scalers of the session opened last; apex's checkpoints load too.

    Raises `ValueError` if the entries are not those of this session, and changes nothing.
    """
    session = registry.latest("ampatch.load_state_dict(...)")
    expected = [f"loss_scaler{index}" for index in range(len(session.scalers))]
    if sorted(state) != sorted(expected):
        raise ValueError(
            f"ampatch.load_state_dict(state): it holds {sorted(state)}, expected "
            f"{expected}. Call initialize with the num_losses of the saved run."
        )
    for name, entry in state.items():
        loss_scale_value(f"state[{name!r}]['loss_scale']", entry["loss_scale"])
    for name, scaler in zip(expected, session.scalers, strict=True):
        scaler.load_state_dict(state[name])


def loss_scale(loss_id: int = 0) -> float:
    """The present loss scale of the session opened last.  Waits for the device."""
    session = registry.latest("ampatch.loss_scale()")
    checks.loss_number(loss_id, len(session.scalers), "ampatch.loss_scale")
    return session.scalers[loss_id].get()


def set_loss_scale(value: float, loss_id: int = 0) -> None:
    """Set the loss scale of the session opened last, within its floor and cap."""
    session = registry.latest("ampatch.set_loss_scale(...)")
    checks.loss_number(loss_id, len(session.scalers), "ampatch.set_loss_scale")
    number = loss_scale_value("loss_scale", value)
    if number == "dynamic":
        raise ValueError(
            'ampatch.set_loss_scale(value="dynamic"): expected a number; '
            'pass loss_scale="dynamic" to initialize.'
        )
    session.scalers[loss_id].set(number)


def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last `optimizer.step()` was left out because of an overflow.

    Waits for the device if the optimizer is a fused one, which decides there.
    """
    managed = registry.managed(optimizer)
    if managed is None:
        if registry.session_of(optimizer) is not None:
            return False
        raise AmpatchError(
            f"ampatch.step_was_skipped(<{type(optimizer).__name__}>): this "
            "optimizer was not given to ampatch.initialize."
        )
    return bool(managed.skipped)


def set_opt_level(model: nn.Module, opt_level: Any) -> None:
    """Put a managed model under another opt level, now.

    Weights keep their FP32 values, optimizers their state.  Call it between
    steps.  Raises `AmpatchError` for a model that no open session manages.
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

    Half weights get their masters' FP32 values.  Harmless when nothing is open.
    """
    registry.close_all()


def observe(observer: Any) -> Callable[[], None]:
    """Have an object told of what happens; returns a function that ends it.

    Its methods, each optional: `on_initialize(properties)`, `on_loss(loss, loss_id)`
    with the unscaled loss of each `scale_loss`, `on_step(optimizer, skipped)` where
    `skipped` is a bool or a 0-dim tensor to read later, `on_metrics(values)`.
    """
    return registry.observe(observer)


def log_metrics(**values: float) -> None:
    """Report numbers of the training (accuracy, ...) to whoever observes it: the sweep, say."""
    registry.tell("on_metrics", {name: float(value) for name, value in values.items()})
