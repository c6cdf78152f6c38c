"""Training runs with Lightning Fabric, for the law of frameworks."""

import contextlib
import itertools
import os
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from framework_runs import Plan, Run, batches, network, optimizer_of
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy

from ampatch.integrations.lightning import AmpatchFabricPrecision


def settings_of(plan: Plan, own: type, ampatchs: type, strategy: type) -> dict[str, Any]:
    """Arguments of a `Fabric` or a `Trainer`; the plugins and the strategy are classes for it."""
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if plan.precision == "float32":
        settings["precision"] = "32-true"
    elif plan.precision == "amp":
        name = "16-mixed" if plan.dtype == "float16" else "bf16-mixed"  # by name: not on a CPU
        settings["plugins"] = [own(name, "cpu")]
    else:
        settings["plugins"] = [ampatchs(**plan.settings)]
    if dist.is_initialized():
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}
        settings["strategy"] = strategy(cluster_environment=LightningEnvironment())
        settings["devices"] = dist.get_world_size()
    return settings


def run(plan: Plan) -> Run:
    settings = settings_of(plan, MixedPrecision, AmpatchFabricPrecision, DDPStrategy)
    fabric = Fabric(**settings)
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": 0}
    if plan.precision == "ampatch":
        [state["precision"]] = settings["plugins"]
    path = plan.folder / "fabric.ckpt"
    if plan.resume:
        fabric.load(path, state)
    losses = []
    loader = fabric.setup_dataloaders(batches(state["batches"]), use_distributed_sampler=False)
    for inputs, targets in itertools.islice(loader, plan.stop_after):
        state["batches"] += 1
        accumulates = state["batches"] % plan.accumulate != 0
        with fabric.no_backward_sync(model) if accumulates else contextlib.nullcontext():
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss / plan.accumulate)
        losses.append(loss.item())
        if accumulates:
            continue
        if plan.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=plan.clip, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    if plan.stop_after is not None:
        fabric.save(path, state)
    return plan.end(losses, model.state_dict())
