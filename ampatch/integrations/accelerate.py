"""accelerate: an `Accelerator` that trains at an opt level.

    from ampatch.integrations.accelerate import AmpatchAccelerator

    accelerator = AmpatchAccelerator("O2", dtype="bfloat16", gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = criterion(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The rest of the script stays as it is, under `accelerate launch` and `torchrun` too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import SCALER_NAME, DistributedType
from torch import Tensor, nn

import ampatch

from ..session.facade import session_of
from ..torch_private.modules import compiled_from
from ..types import HalfName, OptLevel
from .integration_session import IntegrationSession, check_settings
from .process_end import end_gloo_at_exit

_SCALE_FILE = "ampatch.pt"
_ACCELERATOR_ARGUMENTS = frozenset(inspect.signature(Accelerator.__init__).parameters) - {"self"}
_UNSUPPORTED_LAUNCHES = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
)


class AmpatchAccelerator(Accelerator):
    """accelerate's `Accelerator` with ampatch instead of `mixed_precision`.

    Args:
        opt_level: as in `ampatch.initialize`.
        dtype: as in `ampatch.initialize`.
        arguments: settings of `ampatch.initialize`, such as `loss_scale` or `overrides`, and
            arguments of `Accelerator`, by keyword.  The default of `cast_model_outputs` is FP32 at
            every opt level, as in accelerate.

    `backward` scales the loss for all prepared optimizers; afterwards gradients are FP32 and
    unscaled.  After an overflow `optimizer.step()` does nothing,
    `accelerator.optimizer_step_was_skipped` is true, and prepared schedulers do not advance.
    `save_state` saves the loss scales and FP32 weights.

    Raises:
        TypeError, ValueError: an argument is wrong, or `mixed_precision` was set: here, by
            `accelerate launch`, or by an earlier `Accelerator` of the process.
        AmpatchError: `accelerate launch` chose DeepSpeed, FSDP or Megatron-LM.
    """

    def __init__(
        self,
        opt_level: OptLevel = "O1",
        *,
        dtype: torch.dtype | HalfName = torch.float16,
        **arguments: Any,
    ) -> None:
        options = {"cast_model_outputs": torch.float32, **arguments}
        settings = check_settings(
            "AmpatchAccelerator",
            {**options, "opt_level": opt_level, "dtype": dtype},
            _ACCELERATOR_ARGUMENTS,
        )
        arguments = {
            name: value for name, value in arguments.items() if name in _ACCELERATOR_ARGUMENTS
        }
        mixed_precision = arguments.get("mixed_precision")
        _refuse_precision(mixed_precision, "an argument")
        if mixed_precision is None:
            variable = "ACCELERATE_MIXED_PRECISION"
            set_by = f"{variable}, which accelerate launch and its config set"
            _refuse_precision(os.environ.get(variable), set_by)
        super().__init__(**arguments)
        _refuse_precision(self.mixed_precision, "an earlier Accelerator of this process")
        if self.scaler_handler is not None:
            raise ValueError(
                "AmpatchAccelerator(kwargs_handlers=[GradScalerKwargs(...)]): ampatch has a loss "
                "scale of its own. Expected its settings by name: init_scale, growth_factor, "
                "backoff_factor, growth_interval."
            )
        if self.distributed_type in _UNSUPPORTED_LAUNCHES:
            raise ampatch.AmpatchError(
                f"AmpatchAccelerator: launched for {self.distributed_type.value}, which manages "
                "weights and gradients itself. Launch for one device or for several with "
                "DistributedDataParallel, or use accelerate's Accelerator(mixed_precision=...)."
            )
        self._ampatch = IntegrationSession(settings)
        end_gloo_at_exit()
        self.register_save_state_pre_hook(self._save_scales)
        self.register_load_state_pre_hook(self._load_scales)

    # Models and optimizers

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like accelerate's; all prepared models share one session."""
        self._ampatch.open(
            *(_unwrap_model(model) for model in args if isinstance(model, nn.Module))
        )
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Like accelerate's; applies the opt level before it wraps the model."""
        self._ampatch.open(_unwrap_model(model))
        prepared = super().prepare_model(model, *args, **kwargs)
        self._add_optimizers()
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Like accelerate's; ampatch manages the optimizer as soon as its model is prepared."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            on_device = self.device_placement if device_placement is None else device_placement
            optimizer = SkippingOptimizer(optimizer, device_placement=on_device)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._add_optimizers()
        return optimizer

    def _add_optimizers(self) -> None:
        """Manage the optimizers whose models are managed."""
        session = self._ampatch.session
        models = [] if session is None else [managed.model for managed in session.models]
        managed_ids = {id(parameter) for model in models for parameter in model.parameters()}
        self._ampatch.add(
            optimizer
            for optimizer in map(unwrap_optimizer, self._optimizers)
            if session_of(optimizer) is not session and not managed_ids.isdisjoint(_ids(optimizer))
        )

    # Training

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Like accelerate's, for the scaled loss."""
        with self._ampatch.scaled(loss) as scaled_loss:
            super().backward(scaled_loss, **kwargs)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Cast as the opt level says, or nothing with `AutocastKwargs(enabled=False)`."""
        handler = autocast_handler or self.autocast_handler
        if handler is None or handler.enabled:
            yield
        else:
            with ampatch.disable_casts():
                yield

    # Checkpoints

    def _save_scales(self, models: list[nn.Module], weights: list[dict], folder: str) -> None:
        if self._ampatch.session is not None:
            self.save(self._ampatch.scales, Path(folder, _SCALE_FILE))

    def _load_scales(self, models: list[nn.Module], folder: str) -> None:
        self._ampatch.restore(str(folder), _SCALE_FILE, SCALER_NAME)


class SkippingOptimizer(AcceleratedOptimizer):
    """Reports skipped steps to accelerate, and so to its schedulers."""

    _is_accelerate_prepared = True  # so that accelerate does not wrap it again

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of an overflow."""
        is_managed = session_of(self.optimizer) is not None
        return is_managed and ampatch.step_was_skipped(self.optimizer)


def _unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of `prepare`."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif (original := compiled_from(model)) is not None:
            model = original
        else:
            return model


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of accelerate."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _ids(optimizer: Any) -> Iterator[int]:
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _refuse_precision(mixed_precision: Any, set_by: str) -> None:
    """Raise `ValueError` if accelerate's own mixed precision is on."""
    if mixed_precision is not None and str(mixed_precision).lower() != "no":
        raise ValueError(
            f"AmpatchAccelerator: mixed_precision={str(mixed_precision)!r} is set by "
            f'{set_by}. Expected "no", because ampatch casts and scales itself: choose the half '
            'dtype with dtype="float16" or "bfloat16", and launch with --mixed_precision no.'
        )
