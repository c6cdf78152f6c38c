"""`add_models`: models that come after `initialize`, and the loss scales of one session."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

BF16 = torch.bfloat16


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def train(models: list, optimizers: list) -> list[float]:
    inputs, targets = torch.randn(16, 8), torch.randint(0, 4, (16,))
    losses = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(F.cross_entropy(model(inputs), targets) for model in models)
        with ampatch.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_the_same_as_with_all_at_once(opt_level, dtype):
    first, second = build(), build()
    models, optimizers = map(list, zip(first, second, strict=True))
    settings = {"opt_level": opt_level, "dtype": dtype, "verbosity": 0}
    ampatch.initialize(models, optimizers, **settings)
    expected = train(models, optimizers)
    ampatch.deactivate()
    first, second = build(), build()
    ampatch.initialize(*first, **settings)
    assert ampatch.add_models(second[0]) is second[0]
    ampatch.add_optimizers(second[1])
    assert train([first[0], second[0]], [first[1], second[1]]) == expected
    assert list(ampatch.state_dict()) == ["loss_scaler0"]


def test_their_fp32_values_wait_and_masters_that_are_there_stay():
    first, optimizer = build()
    ampatch.initialize(first, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    train([first], [optimizer])
    second, late = build()
    before = second[0].weight.detach().clone()
    ampatch.add_models([second])
    train([first], [optimizer])
    masters = [master.clone() for master in ampatch.master_params(optimizer)]
    ampatch.add_optimizers(late)
    assert torch.equal(next(ampatch.master_params(late)), before)
    assert all(map(torch.equal, ampatch.master_params(optimizer), masters))
    ampatch.deactivate()
    assert torch.equal(second[0].weight, before)


def level_of(model):
    return ampatch.session.session.registry.table.session_of(model).properties.opt_level


def test_they_join_the_session_of_what_they_are_added_to():
    first, optimizer = build()
    ampatch.initialize(first, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    other = ampatch.initialize(build()[0], opt_level="O1", verbosity=0)
    for to in (first, optimizer):
        assert level_of(ampatch.add_models(build()[0], to=to)) == "O2"
    assert level_of(ampatch.add_models(build()[0])) == level_of(other) == "O1"
    hooks = len(first._forward_hooks)
    ampatch.add_models(first, to=first)
    assert len(first._forward_hooks) == hooks  # nothing happens twice


def test_after_an_exception_nothing_has_changed():
    first, optimizer = build()
    ampatch.initialize(first, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    good, bad = build()[0], nn.LazyLinear(3)
    elsewhere = ampatch.initialize(build()[0], opt_level="O1", verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match="in the session of another"):
        ampatch.add_models([good, elsewhere], to=first)
    with pytest.raises(ampatch.AmpatchError, match="lazy module"):
        ampatch.add_models([good, bad], to=first)
    assert good[0].weight.dtype is torch.float32
    with pytest.raises(TypeError, match=r"ampatch\.add_models\(models=\.\.\.\)"):
        ampatch.add_models(optimizer)
    with pytest.raises(ampatch.AmpatchError, match="no session has this Sequential"):
        ampatch.add_models(good, to=build()[0])


def test_a_part_of_a_dtensor_is_refused_in_a_model_that_comes_later_too():
    first, optimizer = build()
    ampatch.initialize(first, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    later = build()[0]
    later[0].weight._st_info = object()  # as DistributedDataParallel(device_mesh=...) leaves it
    with pytest.raises(
        ampatch.AmpatchError, match=r"models\[0\].*'0\.weight', a part of a DTensor"
    ):
        ampatch.add_models(later, to=first)
    assert not later._forward_pre_hooks


def test_one_that_fails_while_it_is_converted_takes_the_others_along(monkeypatch):
    first, optimizer = build()
    ampatch.initialize(first, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    second, third = build()[0], build()[0]

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(third, "register_forward_hook", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        ampatch.add_models([second, third])
    for model in (second, third):
        assert model[0].weight.dtype is torch.float32 and not model._forward_pre_hooks
    train([first], [optimizer])


def test_loss_scales_of_one_session():
    first, _ = build()
    second, optimizer = build()
    ampatch.initialize(first, opt_level="O1", init_scale=8.0, verbosity=0)
    ampatch.initialize(second, optimizer, opt_level="O1", init_scale=4.0, verbosity=0)
    assert ampatch.state_dict(of=first) == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}
    assert ampatch.state_dict(of=optimizer) == ampatch.state_dict(of=second)
    ampatch.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}}, of=first)
    assert ampatch.state_dict(of=first)["loss_scaler0"]["loss_scale"] == 2.0
    assert ampatch.loss_scale() == 4.0
    with pytest.raises(ampatch.AmpatchError, match=r"state_dict\(of=\.\.\.\): no session has this"):
        ampatch.state_dict(of=build()[0])
