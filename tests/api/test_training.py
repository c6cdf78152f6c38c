"""Whole trainings through the public API, beside FP32 runs."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp


class Attention(nn.Module):
    """A transformer encoder over (batch, 6, 8), pooled to 4 classes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM over (batch, 6, 8), its last state to 4 classes."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def conv_net():
    return nn.Sequential(
        nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
    )


MODELS = {"conv": conv_net, "attention": Attention, "recurrent": Recurrent}


def data():
    """Inputs (32, 6, 8) and classes that depend on them."""
    inputs = torch.randn(32, 6, 8, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs.sum((1, 2)).sign() + inputs[:, 0, 0].sign() * 0.5 + 1.5).long()


def train(name, optimizer_class=torch.optim.SGD, steps=25, **settings):
    """Losses of a training; with no `settings`, of plain PyTorch."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    if settings:
        amp.initialize(model, optimizer, verbosity=0, **settings)
    inputs, targets = data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        if settings:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    amp.deactivate()
    return losses


plain_losses = functools.cache(train)


@pytest.mark.parametrize("name", MODELS)
def test_o0_is_plain_fp32_bit_for_bit(name):
    assert train(name, opt_level="O0") == plain_losses(name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_mixed_precision_follows_fp32(name, level, half):
    plain, mixed = plain_losses(name), train(name, opt_level=level, dtype=half)
    assert plain[-1] < plain[0] - 0.03
    assert mixed != plain, "nothing ran in half"
    tolerance = 0.002 if half is torch.float16 and level != "O3" else 0.02
    assert mixed == pytest.approx(plain, abs=tolerance)


def test_fused_sgd_at_o3_trains_or_is_refused(half):
    """torch 2.13's fused SGD on the CPU silently leaves half parameters as they are."""

    def build(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, fused=True)

    try:
        losses = train("conv", build, opt_level="O3", dtype=half)
    except ValueError as refusal:
        assert 'Use fused=False, or opt_level="O2"' in str(refusal)
    else:
        assert losses == pytest.approx(train("conv", build), abs=0.05)
