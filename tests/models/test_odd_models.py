"""Lazy modules, distributed checkpoints, shared memory."""

from __future__ import annotations

import pytest
import torch
from small_training import managed, step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict

import ampatch
from ampatch.errors import AmpatchError

X = torch.linspace(-1, 1, 24).view(6, 4)


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.encoder(x))


def start(level, model=None, **settings):
    model = Net() if model is None else model
    return managed(model, level, kind=torch.optim.AdamW, lr=0.01, **settings)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        step(model(X).float().square().mean(), optimizer)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_lazy_modules_start_at_the_first_forward(level):
    model, optimizer = start(level, model=nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()))
    train(model, optimizer)
    assert type(model[0]) is nn.Linear and model[0].weight.dtype is torch.float32
    assert torch.isfinite(model[0].weight).all()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_lazy_modules_are_refused_until_they_have_weights(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(AmpatchError, match=r"Sequential.*'1\.weight'.*one forward.*before"):
        start(level, model=model)
    assert model[0].weight.dtype is torch.float32 and not ampatch.session.session.registry.sessions
    model(X)
    train(*start(level, model=model))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_distributed_state_of_a_fresh_pair(level, caplog):
    """Its functions make a step of their own to create state; that changes no weight."""
    model, optimizer = start(level, verbosity=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, state = get_state_dict(model, optimizer)
    assert set(state["state"]) == set(dict(model.named_parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "scale_loss" not in caplog.text
    third = torch.full((8,), 1 / 3)
    set_model_state_dict(model, {**before, "encoder.0.bias": third})
    kind = torch.float32 if level == "O2" else torch.bfloat16
    assert torch.equal(model.state_dict()["encoder.0.bias"], third.to(kind))


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_share_their_memory_go_on_sharing_it(level, frozen):
    """Two objects, tied by `.data`: in FP32 each step of one is seen in the other."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    second.weight.requires_grad_(not frozen)
    model = nn.Sequential(first, nn.Tanh(), second)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    for _ in range(2):
        before = first.weight.detach().clone()
        step(model(torch.ones(2, 4)).square().sum(), optimizer)
        assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, before)
    with torch.no_grad():
        first.weight.fill_(0.25)
    ampatch.deactivate()
    assert bool((first.weight == 0.25).all()) and bool((second.weight == 0.25).all())
