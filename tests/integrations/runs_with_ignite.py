"""Runs with ignite's `Engine`, for the law of frameworks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from framework_runs import Plan, Run, batches, network, optimizer_of
from ignite.engine import Engine, Events, supervised_training_step
from ignite.handlers import Checkpoint, DiskSaver
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import ampatch
from ampatch.integrations import ignite


def run(plan: Plan) -> Run:
    model = network()
    optimizer = optimizer_of(model)
    saved = {"model": model, "optimizer": optimizer}
    if plan.precision == "ampatch":
        ampatch.initialize(model, optimizer, **plan.settings)
        saved["scale"] = ignite.LossScale()
    losses: list[float] = []
    trainer = Engine(_step(plan, idist.auto_model(model), optimizer))
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    saved["trainer"] = trainer
    if plan.stop_after is not None:
        at_the_stop = Events.ITERATION_COMPLETED(once=plan.stop_after)
        disk = DiskSaver(str(plan.folder), require_empty=False)
        checkpoint = Checkpoint(saved, disk, filename_pattern="at.pt")
        trainer.add_event_handler(at_the_stop, checkpoint)
        trainer.add_event_handler(at_the_stop, lambda engine: engine.terminate())
    if plan.resume:
        Checkpoint.load_objects(saved, str(plan.folder / "at.pt"))
    trainer.run(batches(done=trainer.state.iteration), max_epochs=1)
    return plan.end(losses, model.state_dict())


def _step(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    """ampatch's update function, or ignite's own, where one clips in a hook of the optimizer."""
    count = {"gradient_accumulation_steps": plan.accumulate}
    clip = None if plan.clip is None else partial(clip_grad_norm_, max_norm=plan.clip)
    if plan.precision == "ampatch":
        return ignite.supervised_training_step(
            model, optimizer, F.cross_entropy, clip=clip, **count
        )
    if clip is not None:
        optimizer.register_step_pre_hook(partial(_clip_first, clip, model))
    if plan.precision == "amp":  # ignite's own enters autocast for CUDA alone
        count["model_fn"] = partial(_under_autocast, getattr(torch, plan.dtype))
    return supervised_training_step(model, optimizer, F.cross_entropy, **count)


def _under_autocast(dtype: torch.dtype, model: nn.Module, inputs: Any) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return model(inputs).float()


def _clip_first(clip: Callable, model: nn.Module, *_: Any) -> None:
    clip(model.parameters())
