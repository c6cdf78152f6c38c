"""Models of the kinds and sizes that users train: of middle size on a CPU, wide on a GPU.

Each has what a step of small layers does not show: tables that a batch reads a few rows of, inputs
that are not contiguous, frozen parts, recurrent layers, norms between convolutions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from tasks import FULL, TINY, LanguageModel, Residual, Task
from torch import Tensor, nn


def layers_of(width: int, count: int, heads: int = 4) -> nn.Sequential:
    """Layers of a transformer encoder, the batch first."""
    layers = [
        nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        for _ in range(count)
    ]
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """Words, learned positions, encoder layers, and a classifier on the mean."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = layers_of(width, layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.words(ids) + self.positions)).mean(1))


class Adapted(nn.Module):
    """A frozen encoder, and an adapter that learns."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.encoder = Encoder(words, width, layers, length).requires_grad_(False)
        self.encoder.head = nn.Identity()  # type: ignore[assignment]
        self.adapter = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.adapter(self.encoder(ids))


class Translator(nn.Module):
    """Encoder and decoder with one embedding, whose weight is the last product's too."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.core = nn.Transformer(
            width, 4, layers, layers, 2 * width, dropout=0.0, batch_first=True
        )

    def forward(self, ids: Tensor) -> Tensor:
        out = self.core(self.words(ids), self.words(ids.flip(1)))
        return F.linear(out[:, :4], self.words.weight)


class ViT(nn.Module):
    """Patches, encoder layers, and a classifier on the mean."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches, self.layers = nn.Conv2d(3, width, 8, 8), layers_of(width, layers)
        self.head = nn.Linear(width, 8)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(pixels).flatten(2).transpose(1, 2)).mean(1))


class Recurrent(nn.Module):
    """Words, a recurrent net of two layers, and a classifier on its last output."""

    def __init__(self, kind: type[nn.RNNBase], words: int, width: int) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(words, width), kind(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(ids))[0][:, -1])


class Recommender(nn.Module):
    """Bags of categories beside numbers, and two MLPs (DLRM, arXiv 1906.00091)."""

    def __init__(self, rows: int, width: int, inner: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(4)])
        self.bottom = nn.Sequential(nn.Linear(13, inner), nn.ReLU(), nn.Linear(inner, width))
        self.top = nn.Sequential(nn.Linear(5 * width, inner), nn.ReLU(), nn.Linear(inner, 8))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        return self.top(torch.cat([self.bottom(numbers), *(bag(ids) for bag in self.bags)], 1))


class Sound(nn.Module):
    """Convolutions with weight norm and group norms, then a GRU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inside = [16, width, width, width]
        self.layers = nn.Sequential(
            *[
                nn.Sequential(
                    nn.utils.parametrizations.weight_norm(nn.Conv1d(a, b, 5, 2, 2)),
                    nn.GroupNorm(4, b),
                    nn.GELU(),
                )
                for a, b in itertools.pairwise(inside)
            ]
        )
        self.rnn, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 8)

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(self.rnn(self.layers(samples).transpose(1, 2))[0].mean(1))


class UNet(nn.Module):
    """Down, up by interpolation, and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def twice(inside: int, outside: int) -> nn.Module:
            convolution = nn.Conv2d(inside, outside, 3, padding=1)
            return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))

        self.first, self.down = twice(3, width), twice(width, 2 * width)
        self.inner, self.up = twice(2 * width, 2 * width), twice(3 * width, width)
        self.head = nn.Conv2d(width, 8, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        first = self.first(pixels)
        inner = self.inner(self.down(F.max_pool2d(first, 2)))
        inner = F.interpolate(inner, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up(torch.cat([first, inner], 1))).mean((2, 3))


class Mixer(nn.Module):
    """MLPs over positions and over channels in turns (arXiv 2105.01601)."""

    def __init__(self, length: int, width: int, layers: int) -> None:
        super().__init__()

        def mlp(size: int) -> nn.Module:
            return nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers)])
        self.mlps = nn.ModuleList([mlp(length if i % 2 == 0 else width) for i in range(2 * layers)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for index, (norm, mlp) in enumerate(zip(self.norms, self.mlps)):
            y = norm(x)
            x = x + (mlp(y) if index % 2 else mlp(y.transpose(1, 2)).transpose(1, 2))
        return self.head(x.mean(1))


class AutoEncoder(nn.Module):
    """Convolutions down to a normal distribution, and transposed ones up (arXiv 1312.6114)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Sequential(
            *[nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1)]
        )
        self.up = nn.Sequential(
            *[nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU()],
            *[nn.ConvTranspose2d(width, 8, 4, 2, 1)],
        )

    def forward(self, pixels: Tensor) -> Tensor:
        mean, spread = self.down(pixels).chunk(2, 1)
        code = mean + spread.exp() * torch.full_like(spread, 0.1)
        return self.up(code).mean((2, 3))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with BatchNorm (MobileNet, arXiv 1704.04861)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        body: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1)]
        for _ in range(layers):
            body += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width)]
            body += [nn.Hardswish(), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)]
        self.layers, self.head = nn.Sequential(*body), nn.Linear(width, 8)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.layers(pixels).mean((2, 3)))


class Tabular(nn.Module):
    """Numbers and categories, BatchNorm and residual blocks of linear layers."""

    def __init__(self, rows: int, width: int, layers: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(rows, width)
        self.first, self.head = nn.Linear(32, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, width), nn.SiLU())
                for _ in range(layers)
            ]
        )

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        x = self.first(numbers) + self.kinds(kinds)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def residual(width: int, blocks: int) -> nn.Module:
    """Residual blocks of convolutions, and a classifier."""
    body = [nn.Conv2d(3, width, 3, padding=1), *[Residual(width) for _ in range(blocks)]]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8))


Pick = Callable[[int, int, int], int]
"""Takes the narrow, the middle or the wide one of three numbers."""
Made = tuple[nn.Module, tuple[Tensor, ...]]
"""A model and its inputs."""


def ids(words: int, *shape: int) -> Tensor:
    """Indices of words."""
    return torch.randint(0, words, shape)


def _words(kind: Callable[..., nn.Module], of: Pick) -> Made:
    words, length, batch = of(600, 30_000, 30_000), of(8, 64, 128), of(4, 8, 32)
    model = kind(words, of(32, 256, 768), of(1, 2, 6), length)
    return model, (ids(words, batch, length),)


def _recurrent(kind: type[nn.RNNBase], of: Pick) -> Made:
    words = of(600, 20_000, 50_000)
    model = Recurrent(kind, words, of(32, 200, 512))
    return model, (ids(words, of(4, 8, 64), of(6, 24, 64)),)


def _decoder(of: Pick) -> Made:
    words, length = of(600, 8_000, 50_304), of(8, 64, 256)
    width, layers = of(32, 192, 768), of(1, 2, 6)
    model = LanguageModel(width, 4, layers, words, length, causal=True)
    return model, (ids(words, of(4, 4, 16), length),)


def _translator(of: Pick) -> Made:
    words, length = of(600, 8_000, 32_000), of(8, 32, 128)
    model = Translator(words, of(32, 192, 512), of(1, 1, 4), length)
    return model, (ids(words, of(4, 8, 32), length),)


def _recommender(of: Pick) -> Made:
    rows, batch = of(600, 50_000, 1_000_000), of(8, 256, 4096)
    model = Recommender(rows, of(32, 32, 64), of(32, 128, 512))
    return model, (ids(rows, batch, 8), torch.randn(batch, 13))


def _tabular(of: Pick) -> Made:
    rows, batch = of(600, 5_000, 100_000), of(8, 256, 8192)
    model = Tabular(rows, of(32, 192, 1024), of(1, 6, 8))
    return model, (torch.randn(batch, 32), ids(rows, batch))


def _pixels(kind: Callable[..., nn.Module], of: Pick, *sizes: int, batch: int, side: int) -> Made:
    return kind(*sizes), (torch.randn(batch, 3, side, side),)


MODELS: dict[str, Callable[[Pick], Made]] = {
    "encoder": partial(_words, Encoder),
    "encoder, frozen": partial(_words, Adapted),
    "decoder, tied": _decoder,
    "translator, tied": _translator,
    "ViT": lambda of: _pixels(
        *(ViT, of, of(32, 192, 768), of(1, 3, 12)), batch=of(2, 8, 64), side=of(16, 64, 224)
    ),
    "mixer": lambda of: (
        Mixer(of(8, 64, 196), of(32, 192, 768), of(1, 3, 12)),
        (torch.randn(of(2, 16, 64), of(8, 64, 196), of(32, 192, 768)),),
    ),
    "LSTM": partial(_recurrent, nn.LSTM),
    "GRU": partial(_recurrent, nn.GRU),
    "EmbeddingBags": _recommender,
    "tabular": _tabular,
    "conv1d, GRU": lambda of: (
        Sound(of(16, 64, 256)),
        (torch.randn(of(2, 8, 32), 16, of(32, 256, 4096)),),
    ),
    "U-Net": lambda of: _pixels(
        *(UNet, of, of(8, 24, 64)), batch=of(2, 4, 16), side=of(8, 48, 256)
    ),
    "ResNet": lambda of: _pixels(
        *(residual, of, of(8, 48, 256), of(1, 3, 8)), batch=of(2, 8, 64), side=of(8, 32, 56)
    ),
    "separable": lambda of: _pixels(
        *(Separable, of, of(8, 64, 512), of(1, 4, 12)), batch=of(2, 8, 64), side=of(8, 64, 224)
    ),
    "autoencoder": lambda of: _pixels(
        *(AutoEncoder, of, of(8, 32, 256)), batch=of(2, 8, 64), side=of(8, 64, 256)
    ),
}


def narrow(narrow: int, middle: int, wide: int) -> int:
    """For tests."""
    return narrow


def middle(narrow: int, middle: int, wide: int) -> int:
    """For a CPU."""
    return middle


def wide(narrow: int, middle: int, wide: int) -> int:
    """For a GPU."""
    return wide


def task(name: str, of: Pick) -> Task:
    """A model that classifies, as a `Task`."""
    model, inputs = MODELS[name](of)

    def loss_of(modules: list[nn.Module]) -> Tensor:
        output = modules[0](*inputs).float().flatten(0, -2)
        return F.cross_entropy(
            output, torch.arange(len(output)).to(output.device) % output.shape[1]
        )

    return Task([model], [loss_of], len(inputs[0]), "examples")


REALISTIC: dict[str, Callable[[], Task]] = {name: partial(task, name, middle) for name in MODELS}
ON_A_DEVICE_TOO = {
    name: {FULL: partial(task, name, wide), TINY: partial(task, name, narrow)} for name in MODELS
}
