"""Weights and optimizer state: FP32 at O2, half at O3; groups that come, weights that freeze."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

BF16 = torch.bfloat16

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = F.mse_loss(model(inputs).float(), targets)
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


def test_small_updates_are_not_lost():
    """Each update is a quarter of bfloat16's spacing at 1: O3 never moves, O2 does."""
    moved = {}
    for level in ("O2", "O3"):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
        for _ in range(64):
            optimizer.zero_grad()
            with ampatch.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        moved[level] = 1.0 - model.weight.item()
        ampatch.deactivate()
    assert moved == {"O2": 64 * 2.0**-10, "O3": 0.0}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_from_before_goes_on(opt_level, kind):
    """Two FP32 steps, then `initialize`: the state is where the next step finds it."""
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    optimizer.zero_grad()
    before = [dict(optimizer.state[param]) for param in model.parameters()]
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=BF16, verbosity=0)
    params = list(ampatch.master_params(optimizer))
    assert len(optimizer.state) == len(params)
    for param, state in zip(params, before, strict=True):
        assert optimizer.state[param].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                dtype = value.dtype if key == "step" else param.dtype
                assert torch.equal(optimizer.state[param][key], value.to(dtype)), key
    train(model, optimizer, range(2, 4))
    if opt_level == "O2":
        assert {p.dtype for p in params} == {torch.float32}
        assert len(optimizer.state) == len(params)


def test_add_param_group_after_initialize(opt_level):
    model = build()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=BF16, verbosity=0)
    train(model, optimizer, range(1))
    before = model[2].weight.detach().clone()
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    model.zero_grad()
    train(model, optimizer, range(1, 3))
    assert not torch.equal(before, model[2].weight)
    added = optimizer.param_groups[1]["params"]
    dtype = BF16 if opt_level == "O3" else torch.float32
    assert [param.dtype for param in added] == [dtype] * 2
    assert added[0] is model[2].weight


@pytest.mark.parametrize("scaled", [True, False])
def test_add_param_group_between_backward_and_step(scaled):
    model = build()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    loss = F.mse_loss(model(batch(0)[0]), batch(0)[1])
    if scaled:
        with ampatch.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    optimizer.step()
    plain = build()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    F.mse_loss(plain(batch(0)[0]), batch(0)[1]).backward()
    reference.step()
    for ours, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert ours.dtype is torch.float32 and torch.allclose(ours, theirs, atol=0.01)


def test_trainable_weights_given_in_half_stay_half_and_it_is_said(half, caplog):
    model = build()
    model[0].to(half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=half, init_scale=256.0)
    assert caplog.text.count("given in half and are trained in half") == 1
    assert "0.weight, 0.bias" in caplog.text and "2.weight" not in caplog.text
    before = values(model.parameters())
    train(model, optimizer, range(3))
    assert [p.dtype for p in model.parameters()] == [half, half, torch.float32, torch.float32]
    assert not any(map(torch.equal, before, model.parameters()))
    ampatch.deactivate()
    assert [p.dtype for p in model.parameters()] == [half, half, torch.float32, torch.float32]


def test_a_frozen_base_in_half_is_no_reason_for_a_warning(half, caplog):
    model = build()
    model[0].to(half).requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=half)
    train(model, optimizer, range(1))
    assert "given in half" not in caplog.text and model[0].weight.dtype is half


def test_frozen_parameters_train_once_they_thaw():
    model = build()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    frozen = values(model[0].parameters())
    train(model, optimizer, range(3))
    assert same(frozen, model[0].parameters())
    model[0].requires_grad_(True)
    train(model, optimizer, range(3, 5))
    assert not same(frozen, model[0].parameters())


def test_parameters_without_gradients_stay(opt_level):
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0, init_scale=64.0)
    before = values(model.parameters())
    hidden = model[:2](batch(0)[0] if opt_level == "O1" else batch(0)[0].to(model[0].weight.dtype))
    with ampatch.scale_loss(hidden.float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    after = values(model.parameters())
    assert not torch.equal(before[0], after[0]) and same(before[2:], after[2:])


def test_optimizer_state_dict_is_float_and_loads_anywhere(half):
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=half, verbosity=0)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    plain = build()
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    reference.load_state_dict(state)
    for entry, param in zip(state["state"].values(), plain.parameters(), strict=True):
        assert {entry[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
        assert torch.equal(reference.state[param]["exp_avg"], entry["exp_avg"])
        assert entry["exp_avg"].any()


def test_parameters_that_came_are_unscaled_beside_those_that_left():
    """A head is exchanged: as many new parameters as old ones that still get gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": list(layer.parameters())} for layer in model]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=1024.0, verbosity=0)
    head, x = nn.Linear(4, 4), torch.randn(2, 4)
    del optimizer.param_groups[1]
    optimizer.add_param_group({"params": list(head.parameters())})
    expected = torch.autograd.grad(head(model(x).float()).square().mean(), head.weight)[0]
    with ampatch.scale_loss(head(model(x).float()).square().mean(), optimizer) as scaled:
        scaled.backward()
    torch.testing.assert_close(head.weight.grad, expected, rtol=1e-3, atol=1e-6)
