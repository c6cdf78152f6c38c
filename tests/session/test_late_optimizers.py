"""`add_optimizers`: the model is given to `initialize` first, its optimizers come later."""

from __future__ import annotations

import logging

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
def test_fp32_values_wait_for_the_optimizer(mode):
    """What conversion rounds is in the checkpoint, in the masters, and back after the end."""
    model, before = build().train(mode == "training"), build().state_dict()
    ampatch.initialize(model, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer = ampatch.add_optimizers(adam(model))
    masters = list(ampatch.master_params(optimizer))
    assert torch.equal(masters[0], before["0.weight"])
    ampatch.deactivate()
    assert torch.equal(model[0].weight, before["0.weight"])


def test_without_an_optimizer_the_values_come_back():
    model, before = build(), build().state_dict()
    ampatch.initialize(model, opt_level="O2", verbosity=0)
    ampatch.deactivate()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_model_changes_before_its_optimizer_comes():
    """A checkpoint is loaded, and a weight written into: masters have these values."""
    model = ampatch.initialize(build(), opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    loaded = {
        key: value + 0.1 if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(loaded)
    with torch.no_grad():
        model[3].bias.fill_(0.3)
    first, *_, last = ampatch.master_params(ampatch.add_optimizers(adam(model)))
    assert torch.equal(first, loaded["0.weight"])
    assert torch.equal(last, torch.full((4,), 0.3).bfloat16().float())


def test_values_are_not_kept_for_a_model_that_runs_without_an_optimizer(caplog):
    model = ampatch.initialize(build(), opt_level="O2", dtype=torch.bfloat16, verbosity=1)
    model(torch.randn(4, 8))
    with caplog.at_level(logging.INFO, "ampatch"):
        optimizer = ampatch.add_optimizers(adam(model))
    assert "master weights start from the half weights" in caplog.text
    master = next(ampatch.master_params(optimizer))
    assert torch.equal(master, model[0].weight.float())


def test_optimizers_come_one_after_the_other():
    """The second finds the FP32 values of its part, which the first does not train."""
    before = build().state_dict()
    model = ampatch.initialize(build(), opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    ampatch.add_optimizers(torch.optim.SGD(model[0].parameters(), lr=0.1))
    last = ampatch.add_optimizers([torch.optim.SGD(model[3].parameters(), lr=0.1)])[0]
    assert torch.equal(next(ampatch.master_params(last)), before["3.weight"])


def test_each_optimizer_joins_the_session_of_its_model():
    first = ampatch.initialize(build(), opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    ampatch.initialize(build(), opt_level="O0", verbosity=0)
    optimizer = ampatch.add_optimizers(adam(first))
    assert next(ampatch.master_params(optimizer)).dtype is torch.float32
    assert first[0].weight.dtype is torch.bfloat16
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
    before = build().state_dict()
    good = torch.optim.SGD(model[0].parameters(), lr=0.1)
    bad = torch.optim.SGD(model[3].parameters(), lr=0.1)
    bad.kept = tuple(model[3].parameters())
    with pytest.raises(ampatch.AmpatchError, match=r"SGD\.kept keeps parameters"):
        ampatch.add_optimizers([good, bad])
    assert good.param_groups[0]["params"][0] is model[0].weight
    assert bad.param_groups[0]["params"][0] is model[3].weight
    assert "step" not in vars(good)
    optimizer = ampatch.add_optimizers(adam(model))
    assert torch.equal(next(ampatch.master_params(optimizer)), before["0.weight"])


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


@pytest.mark.parametrize("come", ["add_optimizers", "unfrozen"])
def test_a_state_dict_held_since_before_there_were_masters_is_an_alias_of_them(come):
    """It undoes no write into a master, shows each step in FP32, and can be written into."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if come == "unfrozen":
        model.requires_grad_(False)
        ampatch.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
        held = model.state_dict()
        model.requires_grad_(True)
    else:
        ampatch.initialize(model, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
        held = model.state_dict()
        ampatch.add_optimizers(optimizer)
    first, *_, last = ampatch.master_params(optimizer)
    with torch.no_grad():
        first.fill_(7.0)
        model(torch.randn(4, 8))
    assert (model[0].weight == 7).all() and (held["0.weight"] == 7).all()
    held["0.weight"].numpy()[...] = 3.0
    model(torch.randn(4, 8))
    assert (model[0].weight == 3).all() and (first == 3).all()
    optimizer.zero_grad()
    with ampatch.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(held["0.weight"], first) and torch.equal(held["3.bias"], last)
    assert (first != 3).any() and torch.equal(first.bfloat16(), model[0].weight)


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
