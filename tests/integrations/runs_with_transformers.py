"""The runs of transformers' Trainer, for the law of frameworks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from framework_runs import BATCH, Plan, Run, dataset, network, optimizer_of
from runs_with_accelerate import name_rank
from torch.nn import functional
from torch.utils.data import SequentialSampler, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from ampatch.integrations.transformers import AmpatchTrainerMixin


class InOrder(Trainer):
    """Takes the batches in order, and keeps each one's loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(inputs["inputs"])
        loss = functional.cross_entropy(outputs, inputs["labels"])
        self.losses.append(loss.item())
        return (loss, outputs) if return_outputs else loss


class AmpatchInOrder(AmpatchTrainerMixin, InOrder):
    """... with ampatch."""


class StopAndSave(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._step:
            control.should_save = control.should_training_stop = True


@contextmanager
def ranks_in_the_environment() -> Iterator[None]:
    """accelerate asks the environment which rank this is, as torchrun sets it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ):
        if dist.is_initialized():
            name_rank()
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _collate(rows: list[tuple]) -> dict[str, torch.Tensor]:
    return dict(zip(("inputs", "labels"), default_collate(rows), strict=True))


@ranks_in_the_environment()
def run(plan: Plan) -> Run:
    if plan.precision == "amp" and plan.dtype == "float16":
        raise NotImplementedError("transformers has no fp16=True on a CPU")
    arguments = TrainingArguments(
        output_dir=str(plan.folder),
        use_cpu=True,
        ddp_backend="gloo" if dist.is_initialized() else None,
        bf16=plan.precision == "amp",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=plan.accumulate,
        max_grad_norm=plan.clip or 0.0,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    kind, settings = InOrder, {}
    if plan.precision == "ampatch":
        kind, settings = AmpatchInOrder, plan.settings
    model = network()
    trainer = kind(
        model,
        arguments,
        data_collator=_collate,
        train_dataset=dataset(),
        optimizers=(optimizer_of(model), None),
        callbacks=[StopAndSave(plan.stop_after // plan.accumulate)] if plan.stop_after else None,
        **settings,
    )
    trainer.train(resume_from_checkpoint=plan.resume)
    return plan.end(trainer.losses, model.state_dict())
