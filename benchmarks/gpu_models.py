"""Models for benchmarks on a GPU: ResNet-50, a GPT-2-small-like and a BERT-large-like stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Workload(NamedTuple):
    """A model, its loss, and how many items (images or tokens) one step trains on."""

    model: nn.Module
    loss_of: Callable[[nn.Module], Tensor]
    items: int
    unit: str


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


def resnet50(depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> nn.Sequential:
    """He et al. 2016 (arXiv 1512.03385), 25.6 million parameters as it stands."""
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
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Block(nn.Module):
    """A transformer block, pre-norm, its attention through SDPA."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Embeddings, blocks, a norm and a head over the vocabulary tied to the embedding."""

    def __init__(
        self, width: int, heads: int, layers: int, vocabulary: int, length: int, causal: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads, causal) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


def images(device: str, small: bool) -> Workload:
    """ResNet-50 at 224 x 224, 128 images."""
    count, size = (2, 32) if small else (128, 224)
    model = resnet50((1, 1), 8) if small else resnet50()
    inputs = torch.randn(count, 3, size, size, device=device)
    inputs = inputs.to(memory_format=torch.channels_last)
    targets = torch.randint(0, 1000, (count,), device=device)
    model = model.to(device).to(memory_format=torch.channels_last)
    return Workload(model, lambda m: F.cross_entropy(m(inputs), targets), count, "images")


def _text(device: str, batch: int, **shape: int | bool) -> Workload:
    model = LanguageModel(**shape).to(device)
    tokens = torch.randint(0, shape["vocabulary"], (batch, shape["length"]), device=device)

    def loss_of(m: nn.Module) -> Tensor:
        return F.cross_entropy(m(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())

    return Workload(model, loss_of, tokens.numel(), "tokens")


def gpt(device: str, small: bool) -> Workload:
    """124 million parameters, 12 layers of 768, 8 texts of 1024 tokens."""
    if small:
        return _text(device, 2, width=16, heads=2, layers=2, vocabulary=64, length=8, causal=True)
    return _text(
        device, 8, width=768, heads=12, layers=12, vocabulary=50304, length=1024, causal=True
    )


def bert(device: str, small: bool) -> Workload:
    """A BERT-large-like stack: 24 layers of 1024, 16 texts of 512 tokens."""
    if small:
        return _text(device, 2, width=16, heads=2, layers=2, vocabulary=64, length=8, causal=False)
    return _text(
        device, 16, width=1024, heads=16, layers=24, vocabulary=30528, length=512, causal=False
    )


WORKLOADS = {"ResNet-50": images, "GPT-2 small": gpt, "BERT large": bert}
