"""`add_models` and `add_optimizers`: what comes after `initialize`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from session_pairs import Slotted
from torch import nn

import ampatch
from ampatch.session.registry import registry

BF16, FP16 = torch.bfloat16, torch.float16
O2 = {"opt_level": "O2", "dtype": BF16, "verbosity": 0}
TYPES = [("O0", FP16), ("O1", FP16), ("O2", FP16), ("O2", BF16), ("O3", FP16)]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    return model, adam(model)


def train(models: list, optimizers: list) -> list[float]:
    """Losses of some steps, on the sum of the models' losses."""
    inputs, targets = torch.randn(16, 8), torch.randint(0, 4, (16,))
    losses = []
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(F.cross_entropy(model(inputs), targets) for model in models)
        with ampatch.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1.0)
            optimizer.step()
        losses.append(loss.item())
    return losses


def level_of(given):
    return registry.table.session_of(given).properties.opt_level


@pytest.mark.parametrize("level, dtype", TYPES)
@pytest.mark.parametrize("count", [1, 2])
def test_the_same_as_with_all_at_once(level, dtype, count):
    """A model, or a second one too, and then the optimizers of both."""
    settings = {"opt_level": level, "dtype": dtype, "verbosity": 0}
    models, optimizers = map(list, zip(*[pair() for _ in range(count)], strict=True))
    ampatch.initialize(models, optimizers, **settings)
    expected = train(models, optimizers)
    weights = [value.clone() for model in models for value in model.state_dict().values()]
    ampatch.deactivate()
    models = [build() for _ in range(count)]
    ampatch.initialize(models[0], **settings)
    if count == 2:
        assert ampatch.add_models(models[1]) is models[1]
    optimizers = [adam(model) for model in models]
    assert ampatch.add_optimizers(optimizers) is optimizers
    assert train(models, optimizers) == expected
    found = [value for model in models for value in model.state_dict().values()]
    assert all(map(torch.equal, found, weights))
    assert list(ampatch.state_dict()) == ["loss_scaler0"]


# Models


def test_they_join_the_session_of_what_they_are_added_to():
    first, optimizer = pair()
    ampatch.initialize(first, optimizer, **O2)
    other = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    for to in (first, optimizer):
        assert level_of(ampatch.add_models(build(), to=to)) == "O2"
    assert level_of(ampatch.add_models(build())) == level_of(other) == "O1"
    hooks = len(first._forward_hooks)
    ampatch.add_models(first, to=first)
    assert len(first._forward_hooks) == hooks  # nothing happens twice


def test_after_an_exception_no_model_has_changed():
    first, optimizer = pair()
    ampatch.initialize(first, optimizer, **O2)
    good, bad = build(), nn.LazyLinear(3)
    elsewhere = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match="in the session of another"):
        ampatch.add_models([good, elsewhere], to=first)
    with pytest.raises(ampatch.AmpatchError, match="lazy module"):
        ampatch.add_models([good, bad], to=first)
    assert good[0].weight.dtype is torch.float32
    with pytest.raises(TypeError, match=r"ampatch\.add_models\(models=\.\.\.\)"):
        ampatch.add_models(optimizer)
    with pytest.raises(ampatch.AmpatchError, match="no session has this Sequential"):
        ampatch.add_models(good, to=build())


def test_a_part_of_a_dtensor_is_refused_in_a_model_that_comes_later_too():
    first, optimizer = pair()
    ampatch.initialize(first, optimizer, **O2)
    later = build()
    later[0].weight._st_info = object()  # as DistributedDataParallel(device_mesh=...) leaves it
    refused = r"models\[0\].*'0\.weight', a part of a DTensor"
    with pytest.raises(ampatch.AmpatchError, match=refused):
        ampatch.add_models(later, to=first)
    assert not later._forward_pre_hooks


def test_one_that_fails_while_it_is_converted_takes_the_others_along(monkeypatch):
    first, optimizer = pair()
    ampatch.initialize(first, optimizer, **O2)
    second, third = build(), build()

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(third, "register_forward_hook", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        ampatch.add_models([second, third])
    for model in (second, third):
        assert model[0].weight.dtype is torch.float32 and not model._forward_pre_hooks
    train([first], [optimizer])


# Optimizers


def test_each_optimizer_joins_the_session_of_its_model():
    first = ampatch.initialize(build(), **O2)
    ampatch.initialize(build(), opt_level="O0", verbosity=0)
    optimizer = ampatch.add_optimizers(adam(first))
    assert level_of(optimizer) == "O2"
    groups = optimizer.param_groups
    assert ampatch.add_optimizers(optimizer).param_groups is groups  # nothing happens twice


@pytest.mark.parametrize("as_list", [True, False])
def test_disabled_sessions_take_optimizers_and_pass_a_loss_through_for_any(as_list):
    """Beside one that is enabled its own must be named, as ever."""
    model = ampatch.initialize(build(), opt_level="O2", enabled=False)
    own = ampatch.add_optimizers(adam(model))
    losses = train([model], [own])
    assert losses[-1] < losses[0] and model[0].weight.dtype is torch.float32
    foreign = adam(build())
    loss = model(torch.ones(2, 8)).sum()
    with ampatch.scale_loss(loss, [foreign] if as_list else foreign) as scaled:
        assert scaled is loss
    with ampatch.scale_loss(loss, [own, foreign]) as scaled:
        assert scaled is loss
    other = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match="was not given to"):
        ampatch.scale_loss(other(torch.ones(2, 8)).sum(), foreign)


def test_after_an_exception_no_optimizer_has_changed():
    model = ampatch.initialize(build(), **O2)
    good = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(TypeError):
        ampatch.add_optimizers([good, Slotted(model[3].parameters())])
    assert "step" not in vars(good)
    assert registry.table.session_of(good) is None
    train([model], [ampatch.add_optimizers(adam(model))])


def test_which_optimizers_are_refused():
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
