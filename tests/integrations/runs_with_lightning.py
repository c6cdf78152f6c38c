"""Training runs with Lightning's Trainer, for the law of frameworks."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
import torch.nn.functional as F
from framework_runs import BATCH, Plan, Run, dataset, network, optimizer_of
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Subset

from ampatch.integrations.lightning import AmpatchPrecision


class Training(pl.LightningModule):
    """The network is a part that `training_step` calls, as in most LightningModules."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.net = network()
        self.plan = plan
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        inputs, targets = batch
        loss = F.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index + 1 == self.plan.stop_after:
            self.trainer.save_checkpoint(_checkpoint(self.plan))
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


class Batches(DataLoader):
    """Says in checkpoints how many batches it has given: Lightning resumes within an epoch."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(super().__iter__(), self.count, None):
            self.count += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["given"]


def run(plan: Plan) -> Run:
    training, data = Training(plan), dataset()
    precision: dict[str, Any] = {"precision": "32-true"}
    if plan.precision == "amp":
        name = "16-mixed" if plan.dtype == "float16" else "bf16-mixed"  # by name: not on a CPU
        precision = {"plugins": [MixedPrecision(name, "cpu")]}
    elif plan.precision == "ampatch":
        plugin = AmpatchPrecision(**plan.settings)
        precision = {"plugins": [plugin]}
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        precision["strategy"] = DDPStrategy(cluster_environment=LightningEnvironment())
        precision["devices"] = world
        data = Subset(data, range(rank, len(data), world))
    trainer = pl.Trainer(
        **{"devices": 1, **precision},
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=plan.accumulate,
        gradient_clip_val=plan.clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = Batches(data, batch_size=BATCH)
    trainer.fit(training, batches, ckpt_path=_checkpoint(plan) if plan.resume else None)
    scales = plugin.state_dict() if plan.precision == "ampatch" else {}
    scale = scales.get("loss_scaler0", {"loss_scale": 1.0})["loss_scale"]
    return Run(training.losses, training.net.state_dict(), scale)


def _checkpoint(plan: Plan) -> str:
    return str(plan.folder / "lightning.ckpt")
