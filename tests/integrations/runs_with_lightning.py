"""Training runs with Lightning's Trainer, for the law of frameworks."""

import itertools
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from framework_runs import BATCH, Plan, Run, batches, network, optimizer_of
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from runs_with_fabric import settings_of
from torch.utils.data import DataLoader

from ampatch.integrations.lightning import AmpatchPrecision

CHECKPOINT = "lightning.ckpt"


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
            self.trainer.save_checkpoint(self.plan.folder / CHECKPOINT)
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
    training = Training(plan)
    settings = settings_of(plan, MixedPrecision, AmpatchPrecision, DDPStrategy)
    trainer = pl.Trainer(
        **settings,
        max_epochs=1,
        accumulate_grad_batches=plan.accumulate,
        gradient_clip_val=plan.clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = Batches(batches().dataset, batch_size=BATCH)
    trainer.fit(training, loader, ckpt_path=str(plan.folder / CHECKPOINT) if plan.resume else None)
    scales = settings["plugins"][0].state_dict() if plan.precision == "ampatch" else {}
    scale = scales.get("loss_scaler0", {"loss_scale": 1.0})["loss_scale"]
    return Run(training.losses, training.net.state_dict(), scale)
