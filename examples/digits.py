"""Train a convolutional network on scikit-learn's handwritten digits.

    python examples/digits.py --opt-level O1 --dtype bfloat16

The script is what it would be without ampatch, but for four places: the
import, `initialize`, `with scale_loss`, and `log_metrics`, which does nothing
but hand the accuracy to `ampatch sweep` when that is watching.

It seeds nothing unless `--seed` is given, so that `ampatch sweep --seeds 3`
can give each run its own seed.  The images that are held out are always the
same.
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

import ampatch as amp


class Net(nn.Module):
    """Two convolutions and three linear layers, for 8 x 8 grey images.

    Most of its work is in `fc1` and `fc2`, which have `width` inputs and outputs.
    """

    def __init__(self, width, classes=10):
        super().__init__()
        channels = width // 16  # on 4 x 4 places after the pooling, so `width` numbers
        self.conv1 = nn.Conv2d(1, channels // 2, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels // 2)
        self.conv2 = nn.Conv2d(channels // 2, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.fc1 = nn.Linear(channels * 4 * 4, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def load(batch_size):
    """Training and test batches; which images are which depends on no seed."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target
    )
    train_loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size, shuffle=True)
    return train_loader, DataLoader(TensorDataset(images[test], labels[test]), batch_size)


def train(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    return total / len(loader.dataset)


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    correct = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(loader.dataset)


def parse_args():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Handwritten digits with mixed precision")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument(
        "--dtype", default="float16" if cuda else "bfloat16", choices=["float16", "bfloat16"]
    )
    parser.add_argument("--loss-scale", default=None, help='"dynamic" or a number')
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 32")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=None, help="for a run that can be repeated")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    train_loader, test_loader = load(args.batch_size)

    model = Net(args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        dtype=getattr(torch, args.dtype),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        loss = train(model, train_loader, optimizer, args.device)
        accuracy = test(model, test_loader, args.device)
        scheduler.step()
        amp.log_metrics(test_accuracy=accuracy)
        print(
            f"epoch {epoch:2d}  loss {loss:.4f}  test accuracy {accuracy:.4f}  "
            f"{time.perf_counter() - start:.1f} s"
        )


if __name__ == "__main__":
    main()
