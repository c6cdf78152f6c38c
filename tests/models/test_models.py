"""O2 and O3: how a model is converted, what its `state_dict` holds, and that writes count."""

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


def dtypes_inside(model):
    """As the model's forward sees them."""
    seen = {}
    handle = model[0].register_forward_hook(lambda *call: seen.update(dtypes(model)))
    model(torch.randn(8, 3))
    handle.remove()
    return seen


# Conversion


@pytest.mark.parametrize(
    "level, keep", [("O2", None), ("O2", True), ("O2", False), ("O3", True), ("O3", "True")]
)
def test_batchnorm_stays_float(level, keep, half):
    """At O2 in any case: its statistics are FP32, and its kernels want weights in their dtype."""
    model, _ = start(level, half, keep_batchnorm_fp32=keep)
    outside, inside = dtypes(model), dtypes_inside(model)
    for found in (outside, inside):
        assert found.pop("1.num_batches_tracked") is torch.int64
    for name, dtype in inside.items():
        assert dtype is (torch.float32 if name in NORMS | FLOAT else half), name
    if level == "O2":
        assert set(outside.values()) == {torch.float32}
    else:
        assert outside == inside


def test_that_batchnorm_stays_float_is_said(caplog):
    caplog.set_level("INFO", "ampatch")
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False)
    assert "keep_batchnorm_fp32=False has no effect" in caplog.text
    caplog.clear()
    ampatch.initialize(build(), opt_level="O2", keep_batchnorm_fp32=False, master_weights=False)
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize(
    "level, settings",
    [
        ("O3", {}),
        ("O3", {"keep_batchnorm_fp32": False}),
        ("O2", {"keep_batchnorm_fp32": "False", "master_weights": False}),
    ],
)
def test_all_is_half(level, settings, half):
    model, _ = start(level, half, **settings)
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


def test_the_forward_sees_the_rounded_float_weights(half):
    plain, (model, optimizer) = build(), start("O2", half)
    seen = {}

    def note(*call):
        seen.update({name: one.detach().clone() for name, one in model.named_parameters()})

    model[0].register_forward_hook(note)
    model(torch.randn(8, 3))
    for name, theirs in plain.named_parameters():
        assert torch.equal(seen[name], theirs.to(theirs.dtype if name in NORMS else half)), name
    ours = zip(ampatch.master_params(optimizer), model.parameters(), strict=True)
    assert all(master is parameter for master, parameter in ours)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


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
def test_state_dict_is_what_there_is(level, half):
    """The model's own tensors: FP32 at O2, half at O3."""
    model, optimizer = start(level, half)
    train(model, optimizer)
    state = model.state_dict()
    assert list(state) == list(build().state_dict())
    own = dict((*model.named_parameters(), *model.named_buffers()))
    assert {name: value.data_ptr() for name, value in state.items()} == {
        name: own[name].data_ptr() for name in state
    }
    found = {value.dtype for name, value in state.items() if name not in FLOAT}
    assert found == {torch.float32 if level == "O2" else half, torch.int64}
    plain = build()
    plain.load_state_dict(state)  # a plain script reads it
    assert torch.equal(plain[0].weight, model[0].weight.float())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_what_is_loaded_is_what_trains(half, trained, part):
    """To the bit in FP32, and the next forward computes with its rounding."""
    model, optimizer = start("O2", half)
    if trained:
        train(model, optimizer)
    other = build(seed=5)
    if part:
        model[3].load_state_dict(other[3].state_dict())
    else:
        model.load_state_dict(other.state_dict())
    for owner, theirs in ((model[3], other[3]), (model, other))[: 1 if part else 2]:
        expected = theirs.state_dict()
        for name, value in owner.state_dict().items():
            assert torch.equal(value, expected[name]), name
    optimizer.zero_grad()
    optimizer.step()  # without gradients
    assert all(map(torch.equal, model[3].parameters(), other[3].parameters()))
    x = torch.randn(4, 4)
    expected = torch.nn.functional.linear(
        x.to(half), other[3].weight.to(half), other[3].bias.to(half)
    )
    assert torch.equal(model[3](x), expected.float())


WRITES = {
    "in place": lambda model, value: model[3].weight.copy_(value),
    "data": lambda model, value: model[3].weight.data.copy_(value),
    "new data": lambda model, value: setattr(model[3].weight, "data", value.clone()),
    "state_dict": lambda model, value: model.state_dict()["3.weight"].copy_(value),
    "parameters()": lambda model, value: list(model.parameters())[-2].copy_(value),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("trained", [False, True])
def test_what_is_written_into_a_weight_counts(way, trained, half):
    """The next forward and the next step start from it, with all its FP32 bits."""
    model, optimizer = start("O2", half, init_scale=64.0)
    if trained:
        train(model, optimizer)
    value = torch.rand(2, 4) + 1 / 3
    with torch.no_grad():
        WRITES[way](model, value)
    optimizer.zero_grad()
    x = torch.randn(4, 4)
    output = model[3](x)
    bias = model[3].bias.to(half)
    expected = torch.nn.functional.linear(x.to(half), value.to(half), bias)
    assert torch.equal(output, expected.float())
    with ampatch.scale_loss(output.square().mean(), optimizer) as scaled:
        scaled.backward()
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    grad = model[3].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[3].weight, torch.add(value, grad, alpha=-0.1))
