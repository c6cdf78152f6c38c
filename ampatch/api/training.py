"""What a training loop calls: `scale_loss`, and questions about scale, skips and weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..config.validation import positive_number, whole_number
from ..errors import AmpatchError, type_name
from ..log import ONCE, logger
from ..scaling.loss_scaler import DynamicScaler, Scaler
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.scaled_backward import PlainBackward
from ..scaling.scaler_entries import load_entries
from ..scaling.steps import StepCounts
from ..session.object_registry import alive
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

    After the block the gradients in the optimizers' `param_groups` are unscaled, added to the
    gradients that were there before.  If they hold an inf or NaN under a dynamic loss scale, the
    next `optimizer.step()` does nothing.  Inside the block `p.grad` is the scaled
    gradient of this block, in FP32 except for half weights.

    Under a static scale of 1, bfloat16's default, the context yields the loss and does nothing
    else.

    If the block raises, the earlier gradients are put back.  Gradients that waited scaled keep what
    the pass has added; this is logged.

    Args:
        loss: floating tensor, usually 0-dim.  The context yields it in FP32, scaled; under a
            static scale of 1 the tensor itself.
        optimizers: the optimizers whose parameters the loss reaches: one, or a list or tuple.
            An object that stands for one is accepted too, if it has the optimizer as `.optimizer`
            and shares its `param_groups` (accelerate's `AcceleratedOptimizer`, Lightning's
            `LightningOptimizer`).
        loss_id: which loss scaler, `0 <= loss_id < num_losses`.
        model: ignored; accepted because apex had it.
        delay_unscale: leave the gradients scaled, to add those of another loss first.  They stay
            in `.grad`, where the next block's pass adds to them.
        delay_overflow_check: update the loss scale only with the next overflow check.

    Raises:
        TypeError: `loss` is no floating tensor, or `loss_id` no whole number.
        ValueError: `optimizers` is empty, or `loss_id` is out of range.
        AmpatchError: `initialize` was not called, or not with these optimizers and enabled.  At the
            end of the block: it has new gradients, and no backward pass came through the scaled
            loss (`loss.backward()`).  This is as if the block had raised.
    """
    if not (isinstance(loss, Tensor) and loss.is_floating_point()):
        got = loss.dtype if isinstance(loss, Tensor) else type_name(loss)
        raise TypeError(
            f"ampatch.scale_loss(loss=...): expected a floating tensor, got {got}. Pass the loss "
            "itself, not loss.item()."
        )
    listed: list[Any] = []
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,):
        pair = registry.objects.find_optimizer(optimizer) or _unmanaged(optimizer, "scale_loss")
        session, managed = pair
        if managed not in listed:
            listed.append(managed)
    if not listed:  # nothing would unscale the gradients
        raise ValueError(
            "ampatch.scale_loss(optimizers=[]): expected the optimizers whose parameters the loss "
            "reaches, at least one."
        )
    if loss_id != 0 or isinstance(loss_id, bool):
        _check_loss_id(loss_id, session, "ampatch.scale_loss")
    if not session.properties.enabled:
        return PlainBackward(loss)
    return session.scaled_backward(loss, listed, loss_id, delay_unscale, delay_overflow_check)


def _managed(optimizer: Any, call: str) -> ManagedOptimizer | None:
    """The managed optimizer, None in a disabled session.  Raises `AmpatchError`."""
    return (registry.objects.find_optimizer(optimizer) or _unmanaged(optimizer, call))[1]


def _unmanaged(optimizer: Any, call: str) -> tuple[Session, None]:
    """The session opened last, for an optimizer that none manages, where all are disabled.

    Else raises an `AmpatchError` that names the optimizers that are managed.
    """
    session = registry.latest(f"ampatch.{call}(...)")
    if not any(each.properties.enabled for each in registry.sessions):
        return session, None
    known = [managed.optimizer for managed in registry.optimizers()]
    known += alive(*[session.unmanaged_entries for session in registry.sessions])
    names = Counter(type(each).__name__ for each in known)
    shown = [name if count == 1 else f"{count} of {name}" for name, count in names.items()]
    raise AmpatchError(
        f"ampatch.{call}(<{type(optimizer).__name__}>): this optimizer was not given to "
        f"ampatch.initialize. Managed are: {', '.join(shown) or 'none'}. Pass one of these, or "
        "give this one to ampatch.initialize. Where it is made after initialize(model), write "
        "behind it: optimizer = ampatch.add_optimizers(optimizer)"
    )


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that `optimizer.step` updates: the optimizer's parameters.

    They are the FP32 master weights, at O2 too: a weight exists once.  For clipping:
    `clip_grad_norm_(ampatch.master_params(optimizer), max_norm)`.

    Raises `TypeError` for an object without `param_groups`.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"ampatch.master_params(optimizer=...): expected an optimizer, with param_groups, got "
            f"{type_name(optimizer)}. Pass what ampatch.initialize has returned."
        )
    return (param for group in optimizer.param_groups for param in group["params"])


def state_dict(of: nn.Module | AnyOptimizer | None = None) -> dict[str, dict[str, Any]]:
    """The loss scalers of one session in apex's format: of the last one, or that of `of`.

    `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`.  An entry also holds
    `"dynamic": False` for a static scale, and the settings that `set_loss_scale_settings`
    has changed.  Where `initialize` was called several times, `of` is a model or an optimizer of
    the session that is meant.  Without it that is the last one that has an optimizer, and a
    warning says so where others have one too.  Waits for the device.

    Raises `AmpatchError` when no session is open, or none has `of`.
    """
    scalers = _scalers_by_name(of, "ampatch.state_dict(of=...)")
    return {name: scaler.state_dict() for name, scaler in scalers.items()}


def load_state_dict(state: dict[str, Any], of: nn.Module | AnyOptimizer | None = None) -> None:
    """Restore the loss scalers of one session, which `of` names as in `state_dict`.

    `state` comes from `state_dict`, from a checkpoint of apex, or from
    `torch.amp.GradScaler.state_dict()`, which every loss scaler then loads.  Entries without a loss
    scaler here are left out, and scalers without an entry stay as they are.  A dynamic scale is not
    loaded into a static scaler, nor a static one into a dynamic scaler.  Each of these is logged.

    Raises:
        TypeError, ValueError: the entries are wrong, or none is that of a loss scaler here.
            Nothing has been changed then.
        AmpatchError: no session is open, or none has `of`.
    """
    load_entries(_scalers_by_name(of, "ampatch.load_state_dict(..., of=...)"), state)


def _scalers_by_name(of: Any, call: str) -> dict[str, Scaler]:
    """The loss scalers of the session that has `of`, else of the last that scales losses."""
    session = registry.session_of(of, call) if of is not None else registry.latest_scaling(call)
    others = [other for other in registry.scaling_sessions() if other is not session]
    if of is None and any(other.looks_for_overflow() for other in others):
        logger.warning(
            "%s: it covers the last session that has an optimizer, and earlier ones have loss "
            "scales of their own. Do the same for their models: ampatch.state_dict(of=model).",
            call,
            extra=ONCE,
        )
    return {f"loss_scaler{index}": scaler for index, scaler in enumerate(session.scalers)}


def loss_scale(loss_id: int = 0) -> float:
    """The present loss scale of the last session that has an optimizer.  Waits for the device.

    Where none has one, that of the session opened last; so too in the functions about its settings.
    With `enabled=False` it is 1.  Raises `TypeError` or `ValueError` for a wrong `loss_id`,
    `AmpatchError` when no session is open.
    """
    session = registry.latest_scaling("ampatch.loss_scale(...)")
    _check_loss_id(loss_id, session, "ampatch.loss_scale")
    return session.scalers[loss_id].get() if session.properties.enabled else 1.0


def _scaler(call: str, loss_id: int) -> Scaler:
    """A loss scaler of the last session that scales losses."""
    session = registry.latest_scaling(f"{call}(...)")
    _check_loss_id(loss_id, session, call)
    return session.scalers[loss_id]


def _check_loss_id(loss_id: Any, session: Session, call: str) -> None:
    """Raise `TypeError` or `ValueError` for a `loss_id` outside `0 <= loss_id < num_losses`."""
    count = len(session.scalers)
    if not 0 <= whole_number(f"{call}(loss_id={loss_id!r})", loss_id) < count:
        raise ValueError(
            f"{call}(loss_id={loss_id}): this session has {count} loss scaler(s), numbered from 0."
            + (f" Call initialize(..., num_losses={loss_id + 1})." if loss_id >= 0 else "")
        )


def set_loss_scale(value: float | str, loss_id: int = 0) -> None:
    """Set the loss scale that `loss_scale` returns; a dynamic one stays within its limits.

    `value` is a positive finite number, which may be a string.  Raises `TypeError` or
    `ValueError` for anything else, and changes nothing then.
    """
    scaler = _scaler("ampatch.set_loss_scale", loss_id)
    what = f"ampatch.set_loss_scale(value={value!r})"
    expected = 'a positive number (loss_scale="dynamic" is for ampatch.initialize)'
    scaler.set(positive_number(what, value, expected, or_text=True))


def loss_scale_settings(loss_id: int = 0) -> dict[str, float]:
    """The settings of the loss scale that `loss_scale` returns; {} where that is static.

    Keys: `init_scale`, `growth_interval`, `growth_factor`, `backoff_factor`,
    `min_loss_scale`, `max_loss_scale`.
    """
    settings = _scaler("ampatch.loss_scale_settings", loss_id).settings
    return {} if settings is None else dataclasses.asdict(settings)


def set_loss_scale_settings(loss_id: int = 0, **settings: Unpack[ScaleSettings]) -> None:
    """Change settings of a dynamic loss scale: the keys of `loss_scale_settings`, as keywords.

    They hold from now on.  A new `init_scale` becomes the present scale.  New limits apply
    to the present scale at once.  `state_dict()` saves the changed settings.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong.
        AmpatchError: the loss scale is static.

    After any of these nothing has been changed.
    """
    what = "ampatch.set_loss_scale_settings(...)"
    scaler = _scaler("ampatch.set_loss_scale_settings", loss_id)
    if not isinstance(scaler, DynamicScaler):
        raise AmpatchError(
            f"{what}: loss scale {loss_id} is static and has no settings. Use "
            'ampatch.set_loss_scale, or initialize(..., loss_scale="dynamic").'
        )
    scaler.change(what, settings)


def step_was_skipped(optimizer: AnyOptimizer) -> bool:
    """Whether the last `optimizer.step()` was skipped because of an overflow.

    Waits for the device if the optimizer is a fused one, which decides there.
    Raises `AmpatchError` for an optimizer that was not given to `initialize`.
    """
    managed = _managed(optimizer, "step_was_skipped")
    return managed is not None and bool(managed.skipped)


def step_counts(optimizer: AnyOptimizer) -> StepCounts:
    """The numbers of steps `taken`, `skipped` and `skipped_in_a_row` (the latest), as ints.

    They are counted since `initialize`; a step with a closure is one step.  Steps that a
    CUDA graph replays are counted too.  With `enabled=False` nothing is counted.  Waits for
    the device if the optimizer is a fused one.  Raises `AmpatchError` for an optimizer that
    was not given to `initialize`.
    """
    managed = _managed(optimizer, "step_counts")
    return StepCounts(0, 0, 0) if managed is None else managed.counter.read()
