"""Training runs with Lightning Fabric, for the law of frameworks."""

import contextlib
import itertools
import os
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from framework_runs import BATCH, Plan, Run, dataset, network, optimizer_of
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader, Subset

from ampatch.integrations.lightning import AmpatchFabricPrecision


def run(plan: Plan) -> Run:
    fabric, plugin = _fabric(plan)
    net = network()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": 0}
    if plugin is not None:
        state["precision"] = plugin
    path = plan.folder / "fabric.ckpt"
    if plan.resume:
        fabric.load(path, state)
    losses = []
    data = Subset(dataset(), range(fabric.global_rank, len(dataset()), fabric.world_size))
    loader = fabric.setup_dataloaders(
        DataLoader(data, batch_size=BATCH), use_distributed_sampler=False
    )
    for inputs, targets in itertools.islice(loader, state["batches"], plan.stop_after):
        state["batches"] += 1
        accumulates = state["batches"] % plan.accumulate != 0
        apart = fabric.no_backward_sync(model) if accumulates else contextlib.nullcontext()
        with apart:
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss / plan.accumulate)
        losses.append(loss.item())
        if not accumulates:
            if plan.clip is not None:
                fabric.clip_gradients(
                    model, optimizer, max_norm=plan.clip, error_if_nonfinite=False
                )
            optimizer.step()
            optimizer.zero_grad()
    if plan.stop_after is not None:
        fabric.save(path, state)
    return plan.end(losses, model.state_dict())


def _fabric(plan: Plan) -> tuple[Fabric, AmpatchFabricPrecision | None]:
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    plugin = None
    if plan.precision == "float32":
        settings["precision"] = "32-true"
    elif plan.precision == "amp":
        name = "16-mixed" if plan.dtype == "float16" else "bf16-mixed"  # by name: not on a CPU
        settings["plugins"] = [MixedPrecision(name, "cpu")]
    else:
        plugin = AmpatchFabricPrecision(**plan.settings)
        settings["plugins"] = [plugin]
    if dist.is_initialized():
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}
        settings["strategy"] = DDPStrategy(cluster_environment=LightningEnvironment())
        settings["devices"] = dist.get_world_size()
    fabric = Fabric(**settings)
    fabric.launch()
    return fabric, plugin
