"""`initialize`, and the functions that undo, extend or observe it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from .. import native
from ..config.opt_levels import warn_of_slow_float16
from ..config.scale_settings import ScaleSettings
from ..errors import AmpatchError, type_name
from ..log import logger, set_verbosity
from ..models.managed_model import ManagedModel
from ..session.session import Session, registry, take_over
from ..types import (
    AnyOptimizer,
    DtypeName,
    HalfName,
    Model,
    Models,
    Optimizers,
    OptLevel,
    Overrides,
)
from . import argument_checks
from .plan import make_plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Never, Unpack

    from ..casting.weight_cache import CacheInfo
    from ..types import Settings


@overload
def initialize(
    models: Models,
    optimizers: None = None,
    enabled: bool = True,
    opt_level: OptLevel = "O1",
    *,
    num_losses: int = 1,
    dtype: torch.dtype | HalfName = torch.float16,
    **settings: Unpack[Settings],
) -> Models: ...


@overload
def initialize(
    models: Models,
    optimizers: Optimizers,
    enabled: bool = True,
    opt_level: OptLevel = "O1",
    *,
    num_losses: int = 1,
    dtype: torch.dtype | HalfName = torch.float16,
    **settings: Unpack[Settings],
) -> tuple[Models, Optimizers]: ...


@argument_checks.refuse_unknown_arguments
def initialize(
    models: nn.Module | Sequence[nn.Module],
    optimizers: AnyOptimizer | Sequence[AnyOptimizer] | None = None,
    enabled: bool = True,
    opt_level: OptLevel = "O1",
    cast_model_type: torch.dtype | DtypeName | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | Literal["True", "False"] | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | DtypeName | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = ScaleSettings.max_loss_scale,
    *,
    dtype: torch.dtype | HalfName = torch.float16,
    overrides: Overrides | None = None,
    init_scale: float = ScaleSettings.init_scale,
    growth_interval: int = ScaleSettings.growth_interval,
    growth_factor: float = ScaleSettings.growth_factor,
    backoff_factor: float = ScaleSettings.backoff_factor,
    max_consecutive_skips: int = 50,
    allow_banned: bool = True,
    process_group: ProcessGroup | None = None,
    patch_scope: Literal["model", "process"] = "model",
) -> Any:
    """Make models and optimizers train in mixed precision.

        model, optimizer = ampatch.initialize(model, optimizer, opt_level="O1")
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            with ampatch.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    Args:
        models: a `torch.nn.Module`, or a list or tuple of them.  They are changed in
            place and returned, so existing references to them stay valid.
        optimizers: an optimizer, or a list or tuple of them, or None.
        enabled: with False this call, `scale_loss` and the other functions do nothing.
        opt_level: `"O0"`: FP32.  `"O1"`: FP32 weights, and torch's functions cast their arguments.
            `"O2"`: the model computes in half, with half copies of its FP32 master weights.
            `"O3"`: everything is half.  `"O4"` and `"O5"`: O1 and O2 in bfloat16.
        cast_model_type: dtype of weights and inputs during a forward.  None: the opt level's.
            False: models are not cast.
        patch_torch_functions: whether torch's functions cast their arguments.  None: the opt
            level's.
        keep_batchnorm_fp32: whether BatchNorm and SyncBatchNorm stay FP32.  None: the opt level's.
            False needs half parameters (O3, or `master_weights=False`); at O2 a message says that
            batch norms stay FP32.
        master_weights: whether parameters stay FP32.  None: the opt level's.
        loss_scale: `"dynamic"`, or a positive number, which may be a string.  None: `"dynamic"`
            for float16 at O1 and O2, otherwise 1.0.
        cast_model_outputs: dtype of the floating outputs of models.  None: FP32 at O0, O2 and O3,
            no cast at O1.
        num_losses: number of independent loss scalers (`loss_id` of `scale_loss`).
        verbosity: 0 silences the logger "ampatch".
        min_loss_scale: lower limit of a dynamic loss scale.  None: 2**-24.
        max_loss_scale: upper limit of a dynamic loss scale.
        dtype: the half dtype: `torch.float16`, `torch.bfloat16`, or a name (`"float16"`, `"fp16"`,
            `"half"`, `"bfloat16"`, `"bf16"`).
        overrides: precision by module path (globs), module class or function:
            `{"decoder.*": "float", nn.Softmax: "float", torch.bmm: "float"}`.  A module takes and
            returns the dtype of the code around it.  At O2 and O3 a function can be "float" only:
            it computes in FP32 internally and returns its usual dtype.  At O0 overrides do
            nothing.  The path of a JSON file works too; `ampatch tune` writes one.
        init_scale: the first dynamic loss scale.
        growth_interval: number of consecutive steps without overflow after which the scale grows.
        growth_factor: the scale is multiplied by this when it grows; above 1.
        backoff_factor: the scale is multiplied by this after an overflow; below 1.
        max_consecutive_skips: number of skipped steps in a row after which an error is logged,
            with the parameters and what to try.  With fused optimizers on an accelerator the error
            comes up to a quarter of this number later.
        allow_banned: whether a function that is unsafe in half (binary_cross_entropy) runs in FP32
            with a warning (True) or raises (False).
        process_group: the ranks that share one overflow flag.  Ranks with shards of the same
            DTensors always share it.
        patch_scope: `"model"` casts calls inside forwards of managed models (and their
            recomputation), and calls on half tensors or managed parameters.  `"process"` casts
            every call, as apex does, except in DataLoaders, their workers and hooks of backward
            passes; use it if there are no models.  Of several sessions, the newest decides.

    A second call with managed models and optimizers gives them the new settings; weights and
    optimizer states keep their values.

    Returns:
        `models` if there are no optimizers, else `(models, optimizers)`: the objects passed in.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        AmpatchError: a model at O3 is already wrapped in DistributedDataParallel; a model at O2 or
            O3 is sharded by other code than `fully_shard` and tensor parallel; `fully_shard` uses
            another dtype than the opt level; or DTensors under DistributedDataParallel come
            without `process_group`.

    After an exception nothing has changed.

    Environment variables such as `AMPATCH_OPT_LEVEL=O2` replace arguments: see
    docs/reference/settings.md.
    """
    settings = locals()
    for name in ("models", "optimizers", "process_group"):
        del settings[name]
    set_verbosity(verbosity)
    plan = make_plan(settings)
    listed_models = argument_checks.as_models(models)
    listed_optimizers = [] if optimizers is None else argument_checks.as_optimizers(optimizers)
    argument_checks.check_objects(plan, listed_models, listed_optimizers, process_group)
    session = Session(
        plan.properties,
        overrides=plan.active_overrides,
        process_group=process_group,
        has_apex_tables=registry.opens_with_apex_tables,
    )

    def notify() -> None:
        registry.observers.notify("on_initialize", plan.properties)
        if plan.replaced_settings:
            registry.observers.notify("on_replaced", plan.replaced_settings)

    with take_over(*listed_models, *listed_optimizers):
        session.open(listed_models, listed_optimizers, notify)
    registry.close_empty()
    logger.info("Initialized:%s", plan.properties.format_settings())
    parameters = (p for model in listed_models for p in model.parameters())
    warn_of_slow_float16(plan.properties, parameters)
    native.log_build_hint()
    return models if optimizers is None else (models, optimizers)


def add_models(models: Models, to: nn.Module | AnyOptimizer | None = None) -> Models:
    """Manage models that are made after `initialize`, with the same settings; returns `models`.

        generator, first = ampatch.initialize(generator, first, opt_level="O2")
        discriminator = ampatch.add_models(discriminator)
        second = ampatch.add_optimizers(torch.optim.Adam(discriminator.parameters()))

    All models of one session share its loss scales.

    Args:
        models: a `torch.nn.Module`, or a list or tuple of them.  Models that the session already
            has are not changed.
        to: a model or an optimizer of the session to join.  None: the newest session.

    Raises:
        TypeError: `models` has an object that is not a module.
        AmpatchError: no session is open, `to` is in no session, a model is in another session, or
            `initialize` would refuse it.

    After an exception nothing has changed.
    """
    user_call = "ampatch.add_models"
    listed = argument_checks.as_models(models, user_call)
    session = registry.require_session_of(to, f"{user_call}(to=...)")
    sessions = [registry.objects.session_of(model) for model in listed]
    if not {*sessions} <= {None, session}:
        raise AmpatchError(
            f"{user_call}(models=...): a model belongs to another call of ampatch.initialize. Call "
            "initialize with that model and its optimizer instead, which moves both."
        )
    new = [model for model, its_session in zip(listed, sessions, strict=True) if not its_session]
    if session.properties.enabled:
        argument_checks.check_models(new, session.properties, session.overrides)
    session.add(new, [])
    return models


def add_optimizers(optimizers: Optimizers) -> Optimizers:
    """Manage optimizers that are made after `initialize(models)`; returns `optimizers`.

        model = ampatch.initialize(model, opt_level="O2")
        optimizer = ampatch.add_optimizers(torch.optim.Adam(model.parameters()))

    They join the session that has their parameters.

    Args:
        optimizers: an optimizer, or a list or tuple of them.  Optimizers that the session already
            has are not changed.

    Raises:
        TypeError: an object has no `param_groups` or no `step`.
        ValueError: an optimizer is listed twice, has no parameter of the session's models, or
            cannot train them.
        AmpatchError: no session is open; the optimizers belong to several sessions; or a model was
            sharded by `fully_shard` without the policy that its opt level needs.

    After an exception nothing has changed.
    """
    user_call = "ampatch.add_optimizers"
    listed = argument_checks.as_optimizers(optimizers, user_call)
    session = _session_for_optimizers(listed)
    new = [optimizer for optimizer in listed if registry.objects.session_of(optimizer) is None]
    if session.properties.enabled:
        models = [managed.model for managed in session.models]
        for managed in session.models:
            managed.check_shards()
        argument_checks.check_optimizers(
            new, models, session.properties, session.process_group, user_call
        )
    session.add([], new)
    return optimizers


def _session_for_optimizers(optimizers: list[Any]) -> Session:
    """The session that has these optimizers or their parameters; otherwise the newest."""
    newest = registry.newest("ampatch.add_optimizers(...)")
    params = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    sessions = {s for s in registry.sessions if not params.isdisjoint(s.parameter_names())}
    of_optimizers = map(registry.objects.session_of, optimizers)
    sessions |= {session for session in of_optimizers if session is not None}
    if len(sessions) > 1:
        raise AmpatchError(
            "ampatch.add_optimizers(optimizers=...): their parameters belong to models of "
            f"{len(sessions)} calls of initialize. Make one optimizer for the models of each call, "
            "and add them one by one."
        )
    return next(iter(sessions), newest)


def unwrap(model: Model) -> Model:
    """A plain copy of a managed model, without patches.

    Raises `AmpatchError` for a model that no open session manages.
    """
    managed = registry.objects.managed(model)
    if not isinstance(managed, ManagedModel):
        raise AmpatchError(
            f"ampatch.unwrap({type(model).__name__}): this model was not given to "
            "ampatch.initialize. For a plain model use copy.deepcopy."
        )
    return copy.deepcopy(model)


def cache_info() -> CacheInfo:
    """`hits`, `misses` and `entries` of the weight cache of the newest session.

    Raises `AmpatchError` when no session is open.
    """
    return registry.newest("ampatch.cache_info()").policies.cache.info()


def deactivate() -> None:
    """Undo every `initialize`: torch, models and optimizers are as they were.

    Half parameters (O3) become FP32 again, with rounded values.  Without an open session the call
    does nothing.  A session whose models and optimizers were all garbage-collected also ends here,
    or at the next `initialize`.

    If a step of the undo fails, the other steps still run, and the error is raised at the end:
    several errors as an `ExceptionGroup`, before Python 3.11 as an `AmpatchError` that names
    them.
    """
    try:
        registry.close_all()
    finally:
        registry.observers.notify("on_deactivate")


def observe(observer: object) -> Callable[[], None]:
    """Register an observer, whose methods are called at events.

    Returns a function that removes it.  The methods, each optional:

        on_initialize(properties)
        on_replaced(values): settings that environment variables replaced:
            `{name: (value of the script, new value)}`.
        on_loss(loss, loss_id): the unscaled loss of a `scale_loss` block.
        on_scale(scale, loss_id): the block's loss scale, a float, or a 0-dim tensor that changes
            later.
        on_backward(loss_id): the backward pass of the block has ended.
        on_unscaled(loss_id): the block has ended; its gradients are unscaled.
        on_step_begin(optimizer)
        on_step(optimizer, skipped): a step has ended; `skipped` is a bool, or a 0-dim tensor to
            read later.
        on_metrics(values): the numbers of `log_metrics`, as a dict.
        on_close(session)
        on_deactivate()
    """
    return registry.observers.add(observer)


def log_metrics(*unnamed: Never, **values: float | torch.Tensor) -> None:
    """Report metrics (accuracy, ...) to observers, such as the sweep.

        ampatch.log_metrics(test_accuracy=0.93)

    Call it after each evaluation, or once at the end: a sweep compares the last value of each name.
    The name says whether higher or lower is better (`accuracy`, `val_loss`); for other names use
    `ampatch sweep --better NAME=higher`.

    Raises `TypeError` for a value without a name, or for a value other than a number or a tensor of
    one element.
    """
    if unnamed:
        raise TypeError(
            f"ampatch.log_metrics({', '.join(map(repr, unnamed))}): expected numbers by name, such "
            "as ampatch.log_metrics(accuracy=0.9)."
        )
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"ampatch.log_metrics({name}={value!r}): expected a number or a tensor of one "
                f"element, got {type_name(value)}."
            ) from None
    registry.observers.notify("on_metrics", numbers)
