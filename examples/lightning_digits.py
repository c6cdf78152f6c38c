"""Train with Lightning's Trainer: one plugin turns ampatch on.

python examples/lightning_digits.py --opt-level O2 --dtype bfloat16
"""

import torch
import torch.nn.functional as F
from common import digits, options, settings
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

import ampatch as amp
from ampatch.integrations.lightning import AmpatchPrecision


class Digits(LightningModule):
    """Nothing in it knows of mixed precision."""

    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
        )
        self.right = []

    def training_step(self, batch, _):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        self.right.append((self.net(images).argmax(1) == labels).float().mean().item())

    def on_validation_epoch_end(self):
        test_accuracy, self.right = sum(self.right) / len(self.right), []
        amp.log_metrics(test_accuracy=test_accuracy)
        print(f"epoch {self.current_epoch + 1:2d}  test accuracy {test_accuracy:.4f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def main():
    args = options("Lightning with mixed precision", epochs=6, lr=0.05)
    if args.seed is not None:
        seed_everything(args.seed, verbose=False)
    loader, test_loader = digits(args)
    trainer = Trainer(
        plugins=[AmpatchPrecision(**settings(args))],
        accelerator="cpu" if args.device == "cpu" else "auto",
        devices=1,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(args.lr), loader, test_loader)


if __name__ == "__main__":
    main()
