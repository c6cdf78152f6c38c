"""`add_optimizers`: the model is given to `initialize` first, its optimizers come later."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict]:
    """Losses of some steps, and the model's FP32 values after them."""
    inputs, targets = torch.randn(16, 8), torch.randint(0, 4, (16,))
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with ampatch.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


class Slotted:
    """No attribute fits in: its `step` cannot be replaced."""

    __slots__ = ("param_groups",)

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]

    def step(self):
        raise NotImplementedError


@LEVELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_same_as_with_the_optimizer_at_once(level, dtype):
    model = build()
    model, optimizer = ampatch.initialize(
        model, adam(model), opt_level=level, dtype=dtype, verbosity=0
    )
    losses, values = train(model, optimizer)
    ampatch.deactivate()
    model = ampatch.initialize(build(), opt_level=level, dtype=dtype, verbosity=0)
    optimizer = adam(model)
    assert ampatch.add_optimizers(optimizer) is optimizer
    found, now = train(model, optimizer)
    assert found == losses
    assert all(torch.equal(now[key], value) for key, value in values.items())


@pytest.mark.parametrize("mode", ["training", "evaluation, as from_pretrained leaves it"])
def test_weights_stay_as_they_are(mode):
    """In the checkpoint, in the optimizer, and after the end."""
    model, before = build().train(mode == "training"), build().state_dict()
    ampatch.initialize(model, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer = ampatch.add_optimizers(adam(model))
    masters = list(ampatch.master_params(optimizer))
    assert torch.equal(masters[0], before["0.weight"])
    ampatch.deactivate()
    assert torch.equal(model[0].weight, before["0.weight"])


def test_each_optimizer_joins_the_session_of_its_model():
    first = ampatch.initialize(build(), opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    ampatch.initialize(build(), opt_level="O0", verbosity=0)
    optimizer = ampatch.add_optimizers(adam(first))
    session = ampatch.session.session.registry.table.session_of(optimizer)
    assert session.properties.opt_level == "O2"
    groups = optimizer.param_groups
    assert ampatch.add_optimizers(optimizer).param_groups is groups  # nothing happens twice


def test_a_disabled_session_takes_them_too():
    model = ampatch.initialize(build(), opt_level="O2", enabled=False)
    optimizer = ampatch.add_optimizers(adam(model))
    losses, _ = train(model, optimizer)
    assert losses[-1] < losses[0]
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("as_list", [True, False])
def test_disabled_sessions_pass_a_loss_through_for_any_optimizer(as_list):
    """Beside one that is enabled its own must be named, as ever."""
    model = build()
    own = adam(model)
    ampatch.initialize(model, own, enabled=False)
    foreign = adam(build())
    loss = model(torch.ones(2, 8)).sum()
    with ampatch.scale_loss(loss, [foreign] if as_list else foreign) as scaled:
        assert scaled is loss
    with ampatch.scale_loss(loss, [own, foreign]) as scaled:
        assert scaled is loss
    other = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match="was not given to"):
        ampatch.scale_loss(other(torch.ones(2, 8)).sum(), foreign)


def test_after_an_exception_nothing_has_changed():
    model = ampatch.initialize(build(), opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    good = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(TypeError):
        ampatch.add_optimizers([good, Slotted(model[3].parameters())])
    assert "step" not in vars(good)
    assert ampatch.session.session.registry.table.session_of(good) is None
    train(model, ampatch.add_optimizers(adam(model)))


def test_what_is_refused():
    with pytest.raises(ampatch.AmpatchError, match=r"add_optimizers\(\.\.\.\): no ampatch session"):
        ampatch.add_optimizers(adam(build()))
    one = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    other = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match="models of 2 calls of initialize"):
        ampatch.add_optimizers([adam(one), adam(other)])
    with pytest.raises(ValueError, match=r"ampatch\.add_optimizers.*none of the model's param"):
        ampatch.add_optimizers(adam(build()))
    with pytest.raises(TypeError, match=r"ampatch\.add_optimizers\(optimizers=\.\.\.\)"):
        ampatch.add_optimizers(one)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_made_of_anothers_masters_trains_the_model_to_the_end(level):
    """Also after `deactivate`, when gradients are the model's own again."""
    model = build()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, first, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    params = list(ampatch.master_params(first))
    second = ampatch.add_optimizers(torch.optim.SGD(params, lr=0.1, momentum=0.9))
    assert all(map(torch.equal, ampatch.master_params(second), params))
    train(model, second)
    ampatch.deactivate()
    own = list(model.parameters())
    assert all(ours is theirs for ours, theirs in zip(second.param_groups[0]["params"], own))
    assert set(second.state) == set(own), "its momentum too"
    before = own[0].detach().clone()
    model(torch.randn(4, 8)).sum().backward()
    second.step()
    assert not torch.equal(own[0], before)
