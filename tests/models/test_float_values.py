"""O2 and O3 lose no FP32 buffer and touch no float64: beside the same model in FP32."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import ampatch

FP32, FP64 = torch.float32, torch.float64
HALF_LEVELS = pytest.mark.parametrize("level", ["O2", "O3"])


def close(found, expected, tolerance=0.05):
    scale = expected.detach().abs().max().clamp(min=1e-3)
    assert ((found.detach().double() - expected.detach().double()).abs().max() / scale) < tolerance


class Everything(nn.Module):
    """Buffers of each kind that half loses, each used in the forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)
        self.register_buffer("mask", torch.triu(torch.full((12, 12), -1e9), 1))
        self.register_buffer("million", torch.tensor([1e6]))
        self.register_buffer("epoch", torch.tensor([1.7e9, 3.25]))
        self.register_buffer("count", torch.tensor(2049.0))
        self.register_buffer("inv_freq", 1 / (100 ** (torch.arange(0, 4) / 4.0)))
        self.register_buffer("wide", torch.tensor([1 / 3], dtype=FP64))
        self.register_buffer("position", torch.randn(12, 8))
        self.register_buffer("ints", torch.arange(3))

    def rotate(self, x):
        angles = torch.outer(torch.arange(x.shape[-2]).float() + 3000, self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

    def forward(self, x):
        self.count += 1
        x = self.norm(x + self.position)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.rotate(q) @ self.rotate(k).transpose(-1, -2) + self.mask
        h = torch.softmax(scores, -1) @ v
        return self.out(h) * (self.million / 1e6) + self.epoch[1]


@HALF_LEVELS
def test_the_state_dict_after_initialize_is_the_one_before(level, half):
    model = nn.Sequential(
        Everything(), nn.InstanceNorm1d(12, affine=True, track_running_stats=True)
    )
    model.append(nn.BatchNorm1d(12))
    with torch.no_grad():
        for norm in (model[1], model[2]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = set(dict(model.named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=half, verbosity=0)
    copied = copy.deepcopy(model).state_dict()
    for name, value in model.state_dict().items():
        if level == "O2" or name not in parameters:  # O3 has rounded weights, and says so
            assert value.dtype is before[name].dtype and torch.equal(value, before[name]), name
            assert torch.equal(copied[name], before[name]), name
    ampatch.deactivate()
    for name, value in model.state_dict().items():
        if level == "O2" or name not in parameters:
            assert torch.equal(value, before[name]), name


@HALF_LEVELS
@pytest.mark.parametrize("checkpointed", [False, True])
def test_such_a_model_computes_and_trains_as_in_float(level, half, checkpointed):
    model = Everything()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    ampatch.initialize(
        model,
        optimizer,
        opt_level=level,
        dtype=half,
        init_scale=128.0,
        loss_scale=128.0,
        verbosity=0,
    )
    inner = model
    if checkpointed:
        model = Checkpointed(model)
    x = torch.randn(4, 12, 8)
    for _ in range(5):
        optimizer.zero_grad()
        theirs.zero_grad()
        output, expected = model(x), plain(x)
        close(output, expected)
        with ampatch.scale_loss(output.square().mean(), optimizer) as scaled:
            scaled.backward()
        expected.square().mean().backward()
        optimizer.step()
        theirs.step()
    for ours, other in zip(inner.state_dict().values(), plain.state_dict().values(), strict=True):
        close(ours, other)
    if not checkpointed:
        assert inner.count == 2049 + 5


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


@HALF_LEVELS
def test_what_half_cannot_hold_is_named_once(level, half, caplog):
    with caplog.at_level(logging.WARNING, logger="ampatch"):
        ampatch.initialize(Everything(), opt_level=level, dtype=half)
    said = [record.getMessage() for record in caplog.records if "buffers" in record.getMessage()]
    assert len(said) == 1 and "Everything" in said[0]
    assert {"million", "epoch", "count"} <= set(said[0].replace(",", "").replace(".", "").split())
    assert "inv_freq" not in said[0] and "position" not in said[0]


class Updated(nn.Module):
    """Buffers that the forward updates: an average, a counter, statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=0.01)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x):
        h = self.norm(self.conv(x))
        flat = h.transpose(1, 2).reshape(-1, 4)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        with torch.no_grad():
            self.average.mul_(0.999).add_(h.mean((0, 2)), alpha=0.001)
            self.seen = self.seen + 1
            self.codes.mul_(0.999).add_(torch.randn(5, 4), alpha=0.001)
        return h * self.average[:, None] + self.codes[nearest].reshape(h.shape).mean()


def test_buffers_that_the_forward_updates_train_as_in_float(half):
    model = Updated()
    plain = copy.deepcopy(model)
    ampatch.initialize(model, opt_level="O2", dtype=half, verbosity=0)
    for number in range(300):
        x = torch.randn(2, 3, 6)
        torch.manual_seed(number)
        model(x)
        torch.manual_seed(number)
        plain(x)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        if not name.startswith("conv"):
            assert value.dtype is expected[name].dtype
            torch.testing.assert_close(value, expected[name], rtol=0.01, atol=0.01)
    assert model.seen == 300 and (model.average - 1).abs().min() > 0.1


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_float64_is_never_touched(opt_level, half):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.exact = nn.Linear(2, 2).double()
            self.norm = nn.BatchNorm1d(2).double()
            self.register_buffer("offset", torch.tensor([1 / 3], dtype=FP64))

        def forward(self, x, y):
            self.seen = y
            return self.inner(x), self.norm(self.exact(y)) + self.offset, y

    model = Mixed()
    before = copy.deepcopy(model)
    y = torch.randn(3, 2, dtype=FP64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=half, verbosity=0)
    for name, value in (*model.exact.state_dict().items(), ("offset", model.offset)):
        assert value.dtype is FP64, name
    x, found, given = model(torch.randn(3, 2), y)
    assert model.seen is y and given is y
    assert torch.equal(found, before(torch.randn(3, 2), y)[1])
    with ampatch.scale_loss(x.float().sum() + found.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.exact.weight.dtype is model.exact.weight.grad.dtype is FP64
    ampatch.deactivate()
    assert model.exact.weight.dtype is FP64 and model.inner.weight.dtype is FP32


def test_an_o1_session_beside_goes_on_casting():
    """Half models with FP32 buffers install patches; outside their forward these cast nothing."""
    other = ampatch.initialize(nn.Linear(2, 2), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    ampatch.initialize(Everything(), opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    x = torch.randn(2, 2)
    assert nn.functional.linear(x, other.weight).dtype is other(x).dtype is torch.bfloat16


@pytest.mark.parametrize("when", ["state_dict", "master_params", "deactivate", "deepcopy"])
def test_a_model_in_the_other_half_type_loses_nothing(when):
    """bfloat16 has numbers that float16 has not: the masters and buffers are what came."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    model.register_buffer("table", torch.tensor([1e-9, 1.0, 1e5], dtype=torch.bfloat16))
    with torch.no_grad():
        model[0].weight.fill_(1e-9)
        model[0].bias.fill_(1e5)
    came = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=torch.float16, verbosity=0)
    if when == "master_params":
        names = [name for name, _ in model.named_parameters()]
        found = dict(zip(names, ampatch.master_params(optimizer), strict=True))
    elif when == "deepcopy":
        found = copy.deepcopy(model).state_dict()
    else:
        if when == "deactivate":
            ampatch.deactivate()
        found = model.state_dict()
    for name, value in found.items():
        if value.is_floating_point():
            assert value.dtype is (torch.bfloat16 if when == "deactivate" else FP32), name
            assert torch.equal(value.float(), came[name].float()), name
