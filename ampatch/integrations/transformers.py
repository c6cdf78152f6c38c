"""transformers' Trainer under an opt level, from transformers 4.57 on.

    from ampatch.integrations.transformers import AmpatchTrainerMixin
    from transformers import Trainer, TrainingArguments

    class MyTrainer(AmpatchTrainerMixin, Trainer):
        pass

    trainer = MyTrainer(
        model, TrainingArguments("out"), train_dataset=rows, opt_level="O2", dtype="bfloat16"
    )
    trainer.train()

Write the mixin before `Trainer`, `Seq2SeqTrainer` or your own Trainer.  The settings of
`ampatch.initialize` are keywords of the trainer.  Do not set `fp16` or `bf16` of
`TrainingArguments`.

Training, evaluation, prediction and `generate` are cast until `ampatch.deactivate()`, with FP32
outputs.  Models and checkpoints are saved in FP32, the loss scale in `ampatch.json`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer

from ..errors import AmpatchError
from ..session.facade import session_of
from .accelerate import SkippingOptimizer, unwrap_optimizer
from .integration_session import SETTINGS, IntegrationSession, check_settings
from .process_end import end_gloo_at_exit

SCALE_FILE = "ampatch.json"
GRAD_SCALER_FILE = "scaler.pt"  # Trainer's, with fp16=True

_METHODS = ("create_accelerator_and_postprocess", "_wrap_model", "_save_scaler", "_load_scaler")
_SUPPORTED_LAUNCHES = (
    DistributedType.NO,
    *(kind for kind in DistributedType if kind.value.startswith("MULTI")),
)


class AmpatchTrainerMixin:
    """Makes a Trainer train, evaluate and save under an opt level; write it before the Trainer.

        class MyTrainer(AmpatchTrainerMixin, Trainer):
            pass

        MyTrainer(model, arguments, train_dataset=rows, opt_level="O2", dtype="bfloat16")

    Args:
        args: arguments of the Trainer.
        kwargs: arguments of the Trainer, and settings of `ampatch.initialize`: `opt_level`
            ("O1"), `dtype`, `loss_scale`, `init_scale`, `overrides`, ...  The default of
            `cast_model_outputs` is FP32, at O1 too.

    Raises:
        TypeError: an argument is unknown, or the mixin comes after the Trainer.
        ValueError: a setting is wrong, or other mixed precision is on: `fp16`, `bf16`,
            `fp16_full_eval`, `bf16_full_eval`, `half_precision_backend`, or accelerate's.
        AmpatchError: the Trainer uses DeepSpeed, FSDP or an optimizer that steps in the backward
            pass.
    """

    args: Any
    accelerator: Any
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(AmpatchTrainerMixin):
            raise TypeError(
                f"class {cls.__name__}: AmpatchTrainerMixin comes after the Trainer, so it "
                f"does nothing. Write class {cls.__name__}(AmpatchTrainerMixin, Trainer)."
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_version()
        settings = {name: kwargs.pop(name) for name in SETTINGS & kwargs.keys()}
        settings = {"opt_level": "O1", "cast_model_outputs": torch.float32, **settings}
        self._ampatch = IntegrationSession(check_settings(type(self).__name__, settings))
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """The accelerator's `backward` scales the loss."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _refuse_settings(self.args, self.accelerator)
        backward = self.accelerator.backward
        self.accelerator.backward = functools.partial(self._ampatch_backward, backward)

    def _ampatch_backward(self, backward: Callable, loss: Tensor, **kwargs: Any) -> None:
        with self._ampatch.scaled(loss) as scaled_loss:
            backward(scaled_loss, **kwargs)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        session, optimizer = self._ampatch.session, unwrap_optimizer(self.optimizer)
        if training and (session is None or session_of(optimizer) is not session):
            model = self.model_wrapped = self.model  # without the DDP of an earlier session
            self._ampatch.open(self.model)
            self._ampatch.add([optimizer])
            if self.optimizer is optimizer:
                self.optimizer = SkippingOptimizer(optimizer)
            end_gloo_at_exit()
        self._ampatch.open(self.model)
        return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        if self.args.should_save:
            text = json.dumps(self._ampatch.scales, indent=2)
            Path(output_dir, SCALE_FILE).write_text(text + "\n")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._ampatch.restore(checkpoint, SCALE_FILE, GRAD_SCALER_FILE)


def _check_version() -> None:
    missing = [name for name in _METHODS if not hasattr(Trainer, name)]
    if missing:
        raise AmpatchError(
            f"AmpatchTrainerMixin: the Trainer of transformers {transformers.__version__} has no "
            f"{', '.join(missing)}, which ampatch extends. Expected transformers 4.57 to 5.23."
        )


def _refuse_settings(arguments: Any, accelerator: Any) -> None:
    """Raise for settings that contradict an opt level."""
    for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
        if getattr(arguments, name, False):
            raise ValueError(
                f"TrainingArguments({name}=True) beside AmpatchTrainerMixin: both would choose the "
                f"precision. Leave {name} out, and give the trainer opt_level and dtype."
            )
    backend = getattr(arguments, "half_precision_backend", "auto")
    if backend != "auto":
        raise ValueError(
            f"TrainingArguments(half_precision_backend={backend!r}) beside AmpatchTrainerMixin: "
            "leave it out; ampatch is the backend."
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"accelerate's mixed_precision={accelerator.mixed_precision!r} (accelerate launch, "
            "ACCELERATE_MIXED_PRECISION) beside AmpatchTrainerMixin: both would choose the "
            'precision. Set it to "no", and give the trainer opt_level and dtype.'
        )
    if accelerator.distributed_type not in _SUPPORTED_LAUNCHES:
        raise AmpatchError(
            f"AmpatchTrainerMixin: {accelerator.distributed_type.value} sets the precision of "
            "weights itself. Expected one device or DistributedDataParallel (torchrun)."
        )
    optim = getattr(arguments.optim, "value", arguments.optim)
    if optim in ("lomo", "adalomo") or optim.endswith("layerwise"):
        raise AmpatchError(
            f"TrainingArguments(optim={optim!r}) beside AmpatchTrainerMixin: this optimizer steps "
            "in the backward pass, on gradients that are still scaled. Choose another optim."
        )
