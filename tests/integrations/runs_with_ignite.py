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
from torch import nn
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

    def clip_first(*_: Any) -> None:
        clip(model.parameters())

    if clip is not None:
        optimizer.register_step_pre_hook(clip_first)
    if plan.precision == "amp":  # ignite's own enters autocast for CUDA alone
        region = torch.autocast("cpu", dtype=getattr(torch, plan.dtype))
        count["model_fn"] = lambda model, inputs: region(model)(inputs).float()
    return supervised_training_step(model, optimizer, F.cross_entropy, **count)
