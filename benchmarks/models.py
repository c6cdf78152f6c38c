"""The models of the benchmarks: dispatch-bound ones (tiny shapes) and compute-bound ones.

`make(name, steps_of)` is for `training_step.py`: every model comes as a list
of `Part`s, one per optimizer; a GAN has two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Task(NamedTuple):
    """Modules, each with an optimizer of its own, and their losses in the order of a step.

    `losses[i](modules)` gives the loss that module i's optimizer descends.
    """

    modules: list[nn.Module]
    losses: list[Callable[[list[nn.Module]], Tensor]]


def _supervised(model: nn.Module, inputs: Tensor, targets: Tensor) -> Task:
    return Task([model], [lambda modules: F.cross_entropy(modules[0](inputs), targets)])


def mlp8() -> Task:
    """Eight layers of width 16."""
    layers = [layer for _ in range(7) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    return _supervised(model, torch.randn(8, 16), torch.randint(0, 4, (8,)))


def conv_net() -> Task:
    """Three convolutions with BatchNorm, 8 channels, 8 x 8 pixels."""
    layers: list[nn.Module] = []
    for inside in (3, 8, 8):
        layers += [nn.Conv2d(inside, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return _supervised(model, torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,)))


class _Pooled(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out.mean(1))


def _encoder(width: int, heads: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def transformer() -> Task:
    """A transformer encoder, four layers, d = 16."""
    model = _Pooled(_encoder(16, 2, 4), nn.Linear(16, 4))
    return _supervised(model, torch.randn(4, 6, 16), torch.randint(0, 4, (4,)))


def lstm() -> Task:
    """An LSTM of two layers, 16 units, 5 steps."""
    model = _Pooled(nn.LSTM(16, 16, 2, batch_first=True), nn.Linear(16, 4))
    return _supervised(model, torch.randn(4, 5, 16), torch.randint(0, 4, (4,)))


def gan() -> Task:
    """Generator and discriminator of four layers each, two optimizers."""

    def stack(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(inside, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
            nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outside),
        )  # fmt: skip

    noise, real = torch.randn(8, 4), torch.randn(8, 8)
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    bce = F.binary_cross_entropy_with_logits

    def of_discriminator(modules: list[nn.Module]) -> Tensor:
        generator, discriminator = modules
        fake = generator(noise).detach()
        return bce(discriminator(real), ones) + bce(discriminator(fake), zeros)

    def of_generator(modules: list[nn.Module]) -> Tensor:
        generator, discriminator = modules
        return bce(discriminator(generator(noise)), ones)

    return Task([stack(4, 8), stack(8, 1)], [of_generator, of_discriminator])


def linears200() -> Task:
    """Two hundred Linear(8, 8) in a row."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(200)])
    return _supervised(model, torch.randn(4, 8), torch.randint(0, 8, (4,)))


def mlp1024() -> Task:
    """Three layers of width 1024, batch 256."""
    model = nn.Sequential(
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    return _supervised(model, torch.randn(256, 1024), torch.randint(0, 10, (256,)))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(out)))


def resnet() -> Task:
    """A stem and three residual blocks, 32 channels, 32 x 32 pixels."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        *[_Residual(32) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return _supervised(model, torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))


def gpt_block() -> Task:
    """Two transformer layers, d = 256, 64 tokens."""
    model = _Pooled(_encoder(256, 4, 2), nn.Linear(256, 10))
    return _supervised(model, torch.randn(8, 64, 256), torch.randint(0, 10, (8,)))


def lstm256() -> Task:
    """An LSTM of two layers, 256 units, 20 steps."""
    model = _Pooled(nn.LSTM(256, 256, 2, batch_first=True), nn.Linear(256, 10))
    return _supervised(model, torch.randn(16, 20, 256), torch.randint(0, 10, (16,)))


DISPATCH_BOUND = {
    "MLP, 8 layers": mlp8,
    "conv net, BatchNorm": conv_net,
    "transformer, d=16": transformer,
    "LSTM": lstm,
    "GAN": gan,
    "200 Linear(8, 8)": linears200,
}
COMPUTE_BOUND = {
    "MLP 1024": mlp1024,
    "ResNet-like": resnet,
    "GPT block, d=256": gpt_block,
    "LSTM 256": lstm256,
}
