"""O2 and O3: how a model is converted, and that its `state_dict` holds FP32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ampatch

NORMS = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
FLOAT = {"offset"}  # buffers of the user's stay in FP32, as under autocast


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))
    model.register_buffer("offset", torch.randn(2))
    return model


def start(level, dtype=torch.float16, seed=0, **settings):
    model = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **settings)
    return model, optimizer


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).float().square().mean()
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def dtypes(model):
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


# Conversion


@pytest.mark.parametrize("level, keep", [("O2", None), ("O2", True), ("O3", True), ("O3", "True")])
def test_batchnorm_stays_float(level, keep, half):
    model, _ = start(level, half, keep_batchnorm_fp32=keep)
    for name, dtype in dtypes(model).items():
        if name != "1.num_batches_tracked":
            assert dtype is (torch.float32 if name in NORMS | FLOAT else half), name


@pytest.mark.parametrize("level, keep", [("O3", None), ("O3", False), ("O2", "False")])
def test_all_is_half(level, keep, half):
    model, _ = start(level, half, keep_batchnorm_fp32=keep)
    found = dtypes(model)
    assert found.pop("1.num_batches_tracked") is torch.int64
    assert found.pop("offset") is torch.float32
    assert set(found.values()) == {half}


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_o0_and_o1_keep_float_weights(level):
    model, _ = start(level)
    found = dtypes(model)
    del found["1.num_batches_tracked"]
    assert set(found.values()) == {torch.float32}


def test_parameters_and_buffers_stay_the_same_objects(opt_level):
    model = build()
    before = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    returned = ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    train(model, optimizer)
    assert returned[0] is model and returned[1] is optimizer and optimizer.param_groups[0] is group
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))


def test_weights_are_the_rounded_float_weights(half):
    plain, (model, optimizer) = build(), start("O2", half)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype)), name
    for master, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.equal(master, theirs)


# state_dict


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def test_shared_weights_stay_shared():
    model, plain = Shared(), Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=64.0, verbosity=0)
    assert model.head.weight is model.embed.weight
    (master,) = ampatch.master_params(optimizer)
    state = model.state_dict()
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(state[name], plain.embed.weight) and state[name].dtype is torch.float32
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embed.weight and copied.head.weight.dtype is torch.float32
    loss = model(torch.tensor([[1, 2]])).square().sum()
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    plain(torch.tensor([[1, 2]])).square().sum().backward()
    assert torch.allclose(master.grad, plain.embed.weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_state_dict_is_float(level, half):
    model, optimizer = start(level, half)
    train(model, optimizer)
    state = model.state_dict()
    assert list(state) == list(build().state_dict())
    assert all(t.dtype is torch.float32 for t in state.values() if t.is_floating_point())
    masters = dict(zip(dict(model.named_parameters()), ampatch.master_params(optimizer)))
    for name, master in masters.items():
        assert torch.equal(state[name], master.float()), name
    assert torch.equal(state["offset"], model.offset.float())
    inner = model[3].state_dict(prefix="p.")
    assert torch.equal(inner["p.weight"], masters["3.weight"].float())
    build().load_state_dict(state)  # a plain script reads it


def test_state_dict_keep_vars():
    model, optimizer = start("O2")
    masters = list(ampatch.master_params(optimizer))
    kept = model.state_dict(keep_vars=True)
    assert kept["0.weight"] is masters[0] and kept["0.weight"].requires_grad
    detached = model.state_dict()["0.weight"]
    assert not detached.requires_grad and detached.data_ptr() == masters[0].data_ptr()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_load_state_dict_reaches_the_masters(half, trained, part):
    model, optimizer = start("O2", half)
    if trained:
        train(model, optimizer)
    other = build(seed=5)
    if part:
        model[3].load_state_dict(other[3].state_dict())
    else:
        model.load_state_dict(other.state_dict())
    for owner, theirs in ((model[3], other[3]), (model, other))[: 1 if part else 2]:
        for name, value in owner.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]) or name == "offset", name
    master = list(ampatch.master_params(optimizer))[-2]
    assert torch.equal(master, other[3].weight) and not torch.equal(master, master.to(half).float())
    assert torch.equal(model[3].weight, other[3].weight.to(half))
    before = master.detach().clone()
    optimizer.zero_grad()
    optimizer.step()  # settles; the masters must not take their own rounding for news
    assert torch.equal(master, before)


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_written_into_half_weights_is_adopted(half, trained):
    model, optimizer = start("O2", half)
    if trained:
        train(model, optimizer)
    masters = list(ampatch.master_params(optimizer))
    before = masters[0].detach().clone()
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
        model[3].bias.fill_(0.75)
    state = model.state_dict()
    clamped = before.abs() > 0.11
    assert clamped.any() and torch.equal(state["3.bias"], torch.full((2,), 0.75))
    assert torch.equal(state["0.weight"][clamped].abs(), model[0].weight[clamped].abs().float())
    kept = before.abs() < 0.09  # elements that the clamp left alone keep their precision
    assert kept.any() and torch.equal(state["0.weight"][kept], before[kept])
    optimizer.step()
    assert torch.equal(masters[0], state["0.weight"])


def test_data_writes_before_the_first_step_are_adopted():
    model, optimizer = start("O2")
    version = model[3].bias._version
    model[3].bias.data = torch.full((2,), 0.5, dtype=torch.float16)
    model[0].bias.data.fill_(0.25)
    assert model[3].bias._version == version  # nothing tells of such a write
    train(model, optimizer, steps=1)
    assert (model[0].bias - 0.25).abs().max() < 0.2
    assert (model[3].bias - 0.5).abs().max() < 0.3 and (model[3].bias > 0.2).all()
