"""What a training loop calls: `scale_loss`, and functions that read scale, skips and weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..config.validation import positive_number, whole_number
from ..errors import AmpatchError, type_name
from ..log import LOG_ONCE, logger
from ..scaling.loss_scaler import DynamicScaler, Scaler
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.scale_loss_block import PlainBlock
from ..scaling.scaler_entries import load_entries
from ..scaling.steps import StepCounts
from ..session.object_registry import live_counterparts
from ..session.session import Session, registry
from ..types import AnyOptimizer, Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..types import ScaleSettings


def scale_loss(
    loss: Tensor,
    optimizers: AnyOptimizer | Sequence[AnyOptimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients after it.

        with ampatch.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    Inside the block `p.grad` is the scaled gradient of this block, in FP32 (in half for half
    weights).  After the block gradients are unscaled and added to earlier ones.  If they hold an
    inf or NaN under a dynamic loss scale, the next `optimizer.step()` does nothing.

    Under a static scale of 1 (bfloat16) the block yields the loss and does nothing else.

    If the block raises an error, gradients are restored as they were before it, and a message is
    logged.  Only gradients that `delay_unscale` left scaled keep what the block has added.

    Args:
        loss: floating tensor, usually 0-dim.  The block yields it scaled, in FP32; under a static
            scale of 1 unchanged.
        optimizers: the optimizer whose parameters the loss reaches, or a list or tuple of them.
            Wrappers that have the optimizer as `.optimizer` and share its `param_groups` work too
            (accelerate's `AcceleratedOptimizer`, Lightning's `LightningOptimizer`).  If optimizers
            come from several calls of `initialize`, the last of their dynamic scales is used.
        loss_id: which loss scaler, `0 <= loss_id < num_losses`.
        model: ignored; accepted because apex had it.
        delay_unscale: leave the gradients in `.grad` scaled, so that the next block adds to them.
        delay_overflow_check: update the loss scale when the optimizer steps, not at the end of the
            block.

    Raises:
        TypeError: `loss` is not a floating tensor, or `loss_id` is not a whole number.
        ValueError: `optimizers` is empty, or `loss_id` is out of range.
        AmpatchError: an optimizer was not passed to `initialize`, or only some were passed with
            `enabled=False`.  At the end of the block: the new gradients are not those of the
            scaled loss (you called `loss.backward()`).
    """
    if not (isinstance(loss, Tensor) and loss.is_floating_point()):
        got = loss.dtype if isinstance(loss, Tensor) else type_name(loss)
        raise TypeError(
            f"ampatch.scale_loss(loss=...): expected a floating tensor, got {got}. Pass the loss "
            "itself, not loss.item()."
        )
    session: Session | None = None
    listed: list[Any] = []
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,):
        found = registry.objects.find_optimizer(optimizer)
        own_session, managed = found or _disabled_session_or_raise(optimizer, "ampatch.scale_loss")
        session = own_session if session is None else _with_dynamic_scale(session, own_session)
        if managed not in listed:
            listed.append(managed)
    if session is None:  # nothing would unscale the gradients
        raise ValueError(
            "ampatch.scale_loss(optimizers=[]): expected the optimizers whose parameters the loss "
            "reaches, at least one."
        )
    if loss_id != 0 or isinstance(loss_id, bool):
        _check_loss_id(loss_id, session, "ampatch.scale_loss")
    if not session.properties.enabled:
        return PlainBlock(loss)
    return session.scale_loss_block(loss, listed, loss_id, delay_unscale, delay_overflow_check)


def _with_dynamic_scale(first: Session, second: Session) -> Session:
    """The session whose scaler scales a loss that optimizers of two sessions share.

    It is the session with a dynamic scale, or `second` if both or neither have one.  Under the
    static scale, the optimizer of the dynamic session would step on inf and NaN.  Raises
    `AmpatchError` if only one session is enabled.
    """
    if first.properties.enabled != second.properties.enabled:
        raise AmpatchError(
            "ampatch.scale_loss(loss, [...]): some of these optimizers were given to initialize "
            "with enabled=False, and nothing would unscale their gradients. Expected the same "
            "enabled=... for all models and optimizers of a loss."
        )
    return first if first.checks_for_overflow() and not second.checks_for_overflow() else second


def _find_managed(optimizer: Any, user_call: str) -> ManagedOptimizer | None:
    """The managed optimizer, or None in a disabled session.

    Raises `AmpatchError` if no session has the optimizer.
    """
    found = registry.objects.find_optimizer(optimizer)
    _, managed = found or _disabled_session_or_raise(optimizer, user_call)
    return managed


def _disabled_session_or_raise(optimizer: Any, user_call: str) -> tuple[Session, None]:
    """For an optimizer that no session manages: the newest session, if all are disabled.

    Otherwise raises an `AmpatchError` that names the optimizers that are managed.
    """
    session = registry.newest(f"{user_call}(...)")
    if not any(other.properties.enabled for other in registry.sessions):
        return session, None
    optimizers = [managed.optimizer for managed in registry.optimizers()]
    optimizers += live_counterparts(*[session.unmanaged_entries for session in registry.sessions])
    names = Counter(type(known).__name__ for known in optimizers)
    shown = [name if count == 1 else f"{count} of {name}" for name, count in names.items()]
    raise AmpatchError(
        f"{user_call}(<{type(optimizer).__name__}>): this optimizer was not given to "
        f"ampatch.initialize. ampatch manages: {', '.join(shown) or 'none'}. Pass one of these, or "
        "give this optimizer to ampatch.initialize. If you make it after initialize(model), call "
        "optimizer = ampatch.add_optimizers(optimizer)"
    )


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that `optimizer.step` updates: the optimizer's parameters.

        torch.nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), max_norm=1.0)

    They are the model's own parameters: FP32 master weights at O1 and O2.

    Raises `TypeError` for an object without `param_groups`.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"ampatch.master_params(optimizer=...): expected an optimizer, with param_groups, got "
            f"{type_name(optimizer)}. Pass the optimizer that ampatch.initialize has returned."
        )
    return (param for group in optimizer.param_groups for param in group["params"])


def state_dict(of: nn.Module | AnyOptimizer | None = None) -> dict[str, dict[str, Any]]:
    """The loss scalers of one session, in apex's format.

        {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}

    An entry also holds `"dynamic": False` for a static scale, and settings that
    `set_loss_scale_settings` changed.  If you called `initialize` several times, pass as `of` a
    model or an optimizer of the session.  Without `of` it is the newest session that has an
    optimizer, and a warning is logged if there are others.  Synchronizes with the device.

    Raises `AmpatchError` if no session is open, or none has `of`.
    """
    scalers = _scalers_by_name(of, "ampatch.state_dict(of=...)")
    return {name: scaler.state_dict() for name, scaler in scalers.items()}


def load_state_dict(state: dict[str, Any], of: nn.Module | AnyOptimizer | None = None) -> None:
    """Restore the loss scalers of one session; `of` is as in `state_dict`.

    `state` comes from `state_dict`, from an apex checkpoint, or from
    `torch.amp.GradScaler.state_dict()`; the state of a GradScaler is loaded into every loss scaler.
    An entry is left out, with a message, if no loss scaler has its name, or if only one of
    entry and scaler is dynamic.  Scalers without an entry do not change.

    Raises:
        TypeError, ValueError: the entries are wrong, or none belongs to a loss scaler.  Nothing
            has changed then.
        AmpatchError: no session is open, or none has `of`.
    """
    load_entries(_scalers_by_name(of, "ampatch.load_state_dict(..., of=...)"), state)


def _scalers_by_name(of: Any, user_call: str) -> dict[str, Scaler]:
    """The loss scalers of the session that has `of`; for None, of the newest that scales losses."""
    session = (
        registry.require_session_of(of, user_call)
        if of is not None
        else registry.newest_scaling(user_call)
    )
    others = [other for other in registry.scaling_sessions() if other is not session]
    if of is None and any(other.checks_for_overflow() for other in others):
        logger.warning(
            "%s: it covers only the newest session that has an optimizer; other sessions have "
            "their own loss scales. Call it for their models too: ampatch.state_dict(of=model).",
            user_call,
            extra=LOG_ONCE,
        )
    return {f"loss_scaler{index}": scaler for index, scaler in enumerate(session.scalers)}


def loss_scale(loss_id: int = 0) -> float:
    """The current loss scale of the newest session that has an optimizer.

    If no session has an optimizer, it is the scale of the newest session.  All functions of
    the loss scale choose the session in this way.  With `enabled=False` the loss scale is 1.
    Synchronizes with the device.

    Raises `TypeError` or `ValueError` for a wrong `loss_id`, `AmpatchError` if no session is open.
    """
    session = registry.newest_scaling("ampatch.loss_scale(...)")
    _check_loss_id(loss_id, session, "ampatch.loss_scale")
    return session.scalers[loss_id].get() if session.properties.enabled else 1.0


def _scaler_of_newest(user_call: str, loss_id: int) -> Scaler:
    """A loss scaler of the newest session that scales losses."""
    session = registry.newest_scaling(f"{user_call}(...)")
    _check_loss_id(loss_id, session, user_call)
    return session.scalers[loss_id]


def _check_loss_id(loss_id: Any, session: Session, user_call: str) -> None:
    """Raise `TypeError` or `ValueError` for a `loss_id` outside `0 <= loss_id < num_losses`."""
    count = len(session.scalers)
    if not 0 <= whole_number(f"{user_call}(loss_id={loss_id!r})", loss_id) < count:
        raise ValueError(
            f"{user_call}(loss_id={loss_id}): this session has {count} loss scaler(s), numbered "
            "from 0."
            + (f" Call initialize(..., num_losses={loss_id + 1})." if loss_id >= 0 else "")
        )


def set_loss_scale(value: float | str, loss_id: int = 0) -> None:
    """Set the loss scale that `loss_scale` returns; a dynamic one stays within its limits.

    `value` is a positive finite number, which may be a string.  Raises `TypeError` or `ValueError`
    for any other value, and changes nothing.
    """
    scaler = _scaler_of_newest("ampatch.set_loss_scale", loss_id)
    user_call = f"ampatch.set_loss_scale(value={value!r})"
    expected = 'a positive number (loss_scale="dynamic" is for ampatch.initialize)'
    scaler.set(positive_number(user_call, value, expected, or_text=True))


def loss_scale_settings(loss_id: int = 0) -> dict[str, float]:
    """The settings of the loss scale that `loss_scale` returns; {} for a static one.

    Keys: `init_scale`, `growth_interval`, `growth_factor`, `backoff_factor`,
    `min_loss_scale`, `max_loss_scale`.
    """
    settings = _scaler_of_newest("ampatch.loss_scale_settings", loss_id).settings
    return {} if settings is None else dataclasses.asdict(settings)


def set_loss_scale_settings(loss_id: int = 0, **settings: Unpack[ScaleSettings]) -> None:
    """Change settings of a dynamic loss scale: the keys of `loss_scale_settings`, as keywords.

    A new `init_scale` becomes the current scale, and new limits apply to the current scale at once.
    `state_dict()` saves the changed settings.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong.
        AmpatchError: the loss scale is static.

    After an exception nothing has changed.
    """
    user_call = "ampatch.set_loss_scale_settings(...)"
    scaler = _scaler_of_newest("ampatch.set_loss_scale_settings", loss_id)
    if not isinstance(scaler, DynamicScaler):
        raise AmpatchError(
            f"{user_call}: loss scale {loss_id} is static and has no settings. Use "
            'ampatch.set_loss_scale, or initialize(..., loss_scale="dynamic").'
        )
    scaler.change_settings(user_call, settings)


def step_was_skipped(optimizer: AnyOptimizer) -> bool:
    """Whether the last `optimizer.step()` was skipped because of an overflow.

    For a fused optimizer it synchronizes with the device.
    Raises `AmpatchError` for an optimizer that was not given to `initialize`.
    """
    managed = _find_managed(optimizer, "ampatch.step_was_skipped")
    return managed is not None and bool(managed.last_step_skipped)


def step_counts(optimizer: AnyOptimizer) -> StepCounts:
    """The numbers of steps `taken`, `skipped` and `skipped_in_a_row` (the latest), as ints.

    Steps are counted since `initialize`; a step with a closure is one step.  Steps in replays of a
    CUDA graph are counted only under a dynamic loss scale.  With `enabled=False` all numbers are 0.
    Synchronizes with the device if the optimizer is fused.  Raises `AmpatchError` for an optimizer
    that was not given to `initialize`.
    """
    managed = _find_managed(optimizer, "ampatch.step_counts")
    return StepCounts(0, 0, 0) if managed is None else managed.counter.read()
