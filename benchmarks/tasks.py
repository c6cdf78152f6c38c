"""What is trained: models with their losses, each a row of `TASKS`.

The first six have tiny shapes, so that a step is calls and not arithmetic; those of `LARGE` are
compute-bound; those of `ON_A_DEVICE` are for a GPU, and come in several sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Task(NamedTuple):
    """Modules, each with an optimizer of its own, and their losses in the order of a step.

    `losses[i](modules)` gives the loss that module i's optimizer descends.  A step trains on so
    many `items`.
    """

    modules: list[nn.Module]
    losses: list[Callable[[list[nn.Module]], Tensor]]
    items: int = 0
    unit: str = ""


def supervised(model: nn.Module, inputs: Tensor, targets: Tensor, unit: str = "items") -> Task:
    """Classification of whole examples, or of each position."""

    def loss_of(modules: list[nn.Module]) -> Tensor:
        return F.cross_entropy(modules[0](inputs).flatten(0, -2), targets.flatten())

    return Task([model], [loss_of], targets.numel(), unit)


def mlp(layers: int, width: int, batch: int, classes: int = 10) -> Task:
    """Linear layers with ReLU between."""
    inside = [layer for _ in range(layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*inside, nn.Linear(width, classes))
    return supervised(model, torch.randn(batch, width), torch.randint(0, classes, (batch,)))


def linears(layers: int, width: int, batch: int) -> Task:
    """Linear layers in a row."""
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    return supervised(model, torch.randn(batch, width), torch.randint(0, width, (batch,)))


class Residual(nn.Module):
    """Two convolutions with batch norms, and the input added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_convolution(width, width, bias=False))
        self.last = nn.Sequential(*_convolution(width, width, bias=False)[:2])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.body(x)))


def _convolution(inside: int, outside: int, **more: Any) -> list[nn.Module]:
    convolution = nn.Conv2d(inside, outside, 3, padding=1, **more)
    return [convolution, nn.BatchNorm2d(outside), nn.ReLU()]


def conv_net(
    widths: list[int], batch: int, pixels: int, blocks: int = 0, classes: int = 10
) -> Task:
    """Convolutions with BatchNorm from each width to the next, then residual blocks."""
    layers = [layer for pair in itertools.pairwise(widths) for layer in _convolution(*pair)]
    layers += [Residual(widths[-1]) for _ in range(blocks)]
    head = nn.Linear(widths[-1], classes)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    inputs = torch.randn(batch, widths[0], pixels, pixels)
    return supervised(model, inputs, torch.randint(0, classes, (batch,)))


class Pooled(nn.Module):
    """A body over positions, and a classifier on the mean of its outputs."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out.mean(1))


def _pooled(body: nn.Module, batch: int, length: int, width: int, classes: int) -> Task:
    inputs, targets = torch.randn(batch, length, width), torch.randint(0, classes, (batch,))
    return supervised(Pooled(body, nn.Linear(width, classes)), inputs, targets)


def encoder(
    width: int, heads: int, layers: int, batch: int, length: int, classes: int = 10, inner: int = 4
) -> Task:
    """A transformer encoder."""
    layer = nn.TransformerEncoderLayer(width, heads, inner * width, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return _pooled(body, batch, length, width, classes)


def lstm(width: int, batch: int, length: int, classes: int = 10) -> Task:
    """An LSTM of two layers."""
    return _pooled(nn.LSTM(width, width, 2, batch_first=True), batch, length, width, classes)


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


class Bottleneck(nn.Module):
    """ResNet's block of 1x1, 3x3 and 1x1 convolutions."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(
    batch: int, pixels: int, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64
) -> Task:
    """He et al. 2016 (arXiv 1512.03385), 25.6 million parameters at its own width."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inside = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inside, width << stage, stride))
            inside = 4 * (width << stage)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))
    inputs, targets = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 1000, (batch,))
    channels_last = torch.channels_last
    model, inputs = model.to(memory_format=channels_last), inputs.to(memory_format=channels_last)
    return supervised(model, inputs, targets, "images")


class Block(nn.Module):
    """A transformer block, pre-norm, its attention through SDPA."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        inner = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Embeddings, pre-norm blocks, a norm and a head over the vocabulary tied to the embedding."""

    def __init__(
        self, width: int, heads: int, layers: int, words: int, length: int, causal: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads, causal) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


def language(
    width: int, heads: int, layers: int, words: int, batch: int, length: int, causal: bool = True
) -> Task:
    """The next of each word."""
    model = LanguageModel(width, heads, layers, words, length, causal)
    tokens = torch.randint(0, words, (batch, length))
    return supervised(model, tokens, tokens.roll(-1, 1), "tokens")


SMALL: dict[str, Callable[[], Task]] = {
    "MLP, 8 layers": partial(mlp, 8, 16, batch=8, classes=4),
    "conv net, BatchNorm": partial(conv_net, [3, 8, 8, 8], batch=4, pixels=8, classes=4),
    "transformer, d=16": partial(encoder, 16, 2, 4, batch=4, length=6, classes=4),
    "LSTM": partial(lstm, 16, batch=4, length=5, classes=4),
    "GAN": gan,
    "200 Linear(8, 8)": partial(linears, 200, 8, batch=4),
}
LARGE: dict[str, Callable[[], Task]] = {
    "MLP 1024": partial(mlp, 3, 1024, batch=256),
    "ResNet-like": partial(conv_net, [3, 32], batch=16, pixels=32, blocks=3),
    "GPT block, d=256": partial(encoder, 256, 4, 2, batch=8, length=64),
    "LSTM 256": partial(lstm, 256, batch=16, length=20),
}
TO_REMEMBER: dict[str, Callable[[], Task]] = {
    "MLP, 8 layers, d=256": partial(mlp, 8, 256, batch=512),
    "conv net, 64 channels": partial(conv_net, [3, 64, 64, 64], batch=16, pixels=16),
    "transformer, d=128": partial(encoder, 128, 4, 4, batch=16, length=32, inner=2),
    "LSTM 128": partial(lstm, 128, batch=32, length=32),
}
"""Of middle size: activations and optimizer state both take memory."""

TASKS: dict[str, Callable[[], Task]] = {
    **SMALL,
    **LARGE,
    **TO_REMEMBER,
    "small GPT": partial(language, 256, 4, 4, 1000, batch=4, length=64),
    "conv net 64": partial(conv_net, [16, 64, 64], batch=32, pixels=32),
}
FULL, TINY, NARROW, WIDE = "full", "tiny", "narrow", "wide"
ON_A_DEVICE: dict[str, dict[str, Callable[[], Task]]] = {
    "ResNet-50": {
        FULL: partial(resnet50, 128, 224),
        TINY: partial(resnet50, 2, 32, (1, 1), 8),
        NARROW: partial(resnet50, 2, 64, width=8),
        WIDE: partial(resnet50, 2, 64),
    },
    "GPT-2 small": {
        FULL: partial(language, 768, 12, 12, 50304, batch=8, length=1024),
        TINY: partial(language, 16, 2, 2, 64, batch=2, length=8),
        NARROW: partial(language, 24, 12, 12, 64, batch=2, length=8),
        WIDE: partial(language, 768, 12, 12, 30528, batch=2, length=8),
    },
    "BERT large": {
        FULL: partial(language, 1024, 16, 24, 30528, batch=16, length=512, causal=False),
        TINY: partial(language, 16, 2, 2, 64, batch=2, length=8, causal=False),
        NARROW: partial(language, 32, 16, 24, 64, batch=2, length=8, causal=False),
        WIDE: partial(language, 1024, 16, 24, 30528, batch=2, length=8, causal=False),
    },
}
"""Of full size; tiny, to try it; and with few inputs in their own depth, narrow or as wide."""
