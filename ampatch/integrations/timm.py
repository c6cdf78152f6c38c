"""timm: `AmpatchScaler` instead of `NativeScaler` in timm's train.py.

Start train.py without `--amp`, so that its `amp_autocast` does nothing.  After its blocks for
`--amp` come these lines:

    import ampatch
    from ampatch.integrations.timm import AmpatchScaler

    model, optimizer = ampatch.initialize(model, optimizer, opt_level="O2", dtype="bfloat16")
    loss_scaler = AmpatchScaler()

`resume_checkpoint`, `ModelEmaV3`, DistributedDataParallel and `torch.compile` follow, as train.py
has them.  Its calls of `loss_scaler`, `CheckpointSaver(amp_scaler=loss_scaler)` and
`resume_checkpoint(loss_scaler=loss_scaler)` stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from timm.utils import dispatch_clip_grad
from torch import Tensor

import ampatch


class AmpatchScaler:
    """Runs the backward pass, clipping and the step; called in the same way as `NativeScaler`.

    Gradients are unscaled after each backward pass, so they are clipped as in FP32 training.
    """

    state_dict_key = "amp_scaler"  # NativeScaler's: its checkpoints go on with ampatch

    def __call__(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Run the backward pass; with `need_update`, clip the gradients and take the step.

        Args:
            loss: of this batch, divided by the number of batches in a step.
            optimizer: one that was given to `ampatch.initialize`.
            clip_grad: the bound of the clipping; None: no clipping.
            clip_mode: "norm", "value" or "agc".
            parameters: the model's parameters to clip, in train.py without the head for "agc".
                None: all that the optimizer has.
            create_graph: for optimizers of second order.
            need_update: False for all but the last batch of an accumulation.
        """
        with ampatch.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            dispatch_clip_grad(_params(optimizer, parameters), clip_grad, mode=clip_mode)
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, as `ampatch.state_dict()`."""
        return ampatch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale, from a run with ampatch, apex or `NativeScaler`."""
        ampatch.load_state_dict(state_dict)


def _params(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor] | None) -> list[Tensor]:
    """`parameters` as a list; if None, all that the step updates."""
    if parameters is None:
        return list(ampatch.master_params(optimizer))
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
