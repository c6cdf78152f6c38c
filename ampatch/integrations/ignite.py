"""ignite: the update functions of supervised engines, and the loss scale for checkpoints.

    from ampatch.integrations.ignite import LossScale, supervised_training_step

    model, optimizer = ampatch.initialize(model, optimizer, opt_level="O2", dtype="bfloat16")
    model = idist.auto_model(model)
    trainer = Engine(supervised_training_step(model, optimizer, criterion, idist.device()))
    kept = {"model": model, "optimizer": optimizer, "trainer": trainer, "scale": LossScale()}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(kept, DiskSaver("checkpoints")))
    trainer.run(loader, max_epochs=2)

`initialize` comes before `idist.auto_model`, which wraps the model in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from ignite.engine import Engine
from ignite.engine import supervised_evaluation_step as evaluation_step
from ignite.utils import apply_to_tensor, convert_tensor
from torch import Tensor, nn

import ampatch


class LossScale:
    """The loss scale of ampatch, for `to_save` of ignite's `Checkpoint`."""

    def state_dict(self) -> dict[str, Any]:
        """`ampatch.state_dict()`."""
        return ampatch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """`ampatch.load_state_dict(state_dict)`: loads a `GradScaler`'s state too."""
        ampatch.load_state_dict(state_dict)


def prepare_batch(
    batch: Any, device: str | torch.device | None = None, non_blocking: bool = False
) -> tuple[Any, ...]:
    """The inputs and targets of a batch on `device`, in their own dtypes: the model casts them."""
    inputs, targets = batch
    return (
        convert_tensor(inputs, device=device, non_blocking=non_blocking),
        convert_tensor(targets, device=device, non_blocking=non_blocking),
    )


def supervised_training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, ...]] = prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = lambda x, y, y_pred, loss: (
        loss.item()
    ),
    clip: Callable[[Iterable[Tensor]], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
) -> Callable[[Engine, Any], Any]:
    """Make the update function of an `Engine`, in place of ignite's `supervised_training_step_amp`.

    The arguments are those of ignite's function.  There is no `scaler`, and these two differ:

    Args:
        optimizer: an optimizer that was given to `ampatch.initialize`.
        clip: called before each step with the tensors that the step updates, whose gradients are
            unscaled: `lambda params: clip_grad_norm_(params, 1.0)`.
    """
    if gradient_accumulation_steps <= 0:
        raise ValueError(
            "ampatch.integrations.ignite.supervised_training_step("
            f"gradient_accumulation_steps={gradient_accumulation_steps!r}): expected a number of "
            "batches, 1 or more; 1 takes a step at every batch."
        )

    def update(engine: Engine, batch: Any) -> Any:
        offset = engine.state.iteration % gradient_accumulation_steps
        if offset == 1 % gradient_accumulation_steps:
            optimizer.zero_grad()
        model.train()
        x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
        y_pred = model_transform(model_fn(model, x))
        loss = loss_fn(y_pred, y)
        with ampatch.scale_loss(loss / gradient_accumulation_steps, optimizer) as scaled_loss:
            scaled_loss.backward()
        if offset == 0:
            if clip is not None:
                clip(ampatch.master_params(optimizer))
            optimizer.step()
        return output_transform(x, y, y_pred, loss)

    return update


def supervised_evaluation_step(
    model: nn.Module,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, ...]] = prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any], Any] = lambda x, y, y_pred: (y_pred, y),
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
) -> Callable[[Engine, Any], Any]:
    """Make the evaluation function of an `Engine`, in place of ignite's own.

    The arguments are those of `ignite.engine.supervised_evaluation_step`.  Half predictions become
    FP32 after `model_transform`, so that metrics do not sum them in half.
    """

    def transform(output: Any) -> Any:
        return apply_to_tensor(model_transform(output), _to_fp32)

    return evaluation_step(
        model, device, non_blocking, prepare_batch, transform, output_transform, model_fn
    )


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
