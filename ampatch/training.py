"""What a training loop calls: `scale_loss`, and questions about scale, skips and masters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from . import checks
from .errors import AmpatchError
from .opt_levels import loss_scale_value
from .session import registry


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
    managed = registry.managed(optimizer)
    if managed is not None:
        managed.take_unscaled()  # what a plain backward left in half weights
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
