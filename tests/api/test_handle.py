"""`ampatch.init` and its handle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampatch

HALF, SINGLE = torch.float16, torch.float32


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_casting_lasts_from_init_to_deactivate_and_again():
    for _ in range(2):
        handle = ampatch.init()
        assert handle.is_active() and product() is HALF
        assert ampatch.session.session.registry.state.process.devices is None
        handle._deactivate()
        assert not handle.is_active() and product() is SINGLE


def test_deactivate_ends_a_handle():
    handle = ampatch.init()
    ampatch.deactivate()
    assert not handle.is_active() and product() is SINGLE


def test_a_second_init_returns_the_active_handle(caplog):
    handle = ampatch.init()
    assert ampatch.init() is handle
    assert not caplog.records
    assert ampatch.init(loss_scale=8.0) is handle
    assert "loss_scale=8.0" in caplog.text


def test_disabled():
    handle = ampatch.init(enabled=False)
    assert not handle.is_active() and product() is SINGLE
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    wrapped = handle.wrap_optimizer(optimizer)
    for scaling in (handle.scale_loss(weight.sum(), optimizer), wrapped.scale_loss(weight.sum())):
        with scaling as loss:
            assert loss.item() == 2.0
    wrapped.step()
    assert "step" not in vars(optimizer)


def test_losses_are_scaled_and_gradients_are_not():
    handle = ampatch.init(loss_scale=128.0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(1, 2)
    loss = model(x).sum()
    with handle.scale_loss(loss, optimizer) as scaled:
        assert float(scaled.detach()) == pytest.approx(128 * float(loss.detach()))
        scaled.backward()
    assert torch.equal(model.weight.grad, x)
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5)


def test_an_overflow_skips_the_step():
    handle = ampatch.init()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with handle.scale_loss((weight * float("inf")).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(weight, torch.ones(2))
    assert ampatch.loss_scale() == 2.0**15


def test_a_wrapped_optimizer_has_a_scale_for_each_loss():
    handle = ampatch.init()
    weight = nn.Parameter(torch.ones(2))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5), num_loss=2)
    assert optimizer.param_groups[0]["lr"] == 0.5 and "state" in optimizer.state_dict()
    optimizer.zero_grad()
    with optimizer.scale_loss(weight.sum()) as scaled:
        scaled.backward()
    with optimizer.scale_loss((weight * float("inf")).sum()) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(weight, torch.ones(2))
    assert [ampatch.loss_scale(index) for index in (1, 2)] == [2.0**16, 2.0**15]
    optimizer.zero_grad()
    with optimizer.scale_loss(weight.sum()) as scaled:
        assert float(scaled.detach()) == 2 * 2.0**16  # the first loss's again
        scaled.backward()
    optimizer.step()
    assert torch.equal(weight, torch.full((2,), 0.5))
    with optimizer.scale_loss(weight.sum()) as scaled:
        assert float(scaled.detach()) == 2.0**16  # a step begins the turns anew
    handle._deactivate()
    assert "step" not in vars(optimizer._optimizer)


def test_a_handle_outlives_its_optimizers():
    handle = ampatch.init()
    handle.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    ampatch.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert handle.is_active() and handle._session in ampatch.session.session.registry.sessions


def test_unsafe_functions_are_refused_on_half():
    half = torch.full((2,), 0.5, dtype=HALF)
    handle = ampatch.init()
    with pytest.raises(NotImplementedError):
        nn.functional.binary_cross_entropy(half, half)
    with pytest.raises(NotImplementedError):
        half.exp_()
    handle._deactivate()
    ampatch.init(allow_banned=True)
    assert nn.functional.binary_cross_entropy(half, half).dtype is SINGLE


def test_the_cache_is_never_stale():
    handle = ampatch.init(enable_caching=True)
    model = nn.Linear(2, 2, bias=False)
    first = model(torch.ones(1, 2))
    model.weight.data.add_(1.0)
    assert torch.allclose(model(torch.ones(1, 2)).float(), first.float() + 2, atol=1e-2)
    handle.remove_cache(model.weight)
    handle._clear_cache()
    assert handle.has_cache
    handle._deactivate()
    assert not ampatch.init(enable_caching=False).has_cache


def test_wrong_arguments_are_named():
    handle = ampatch.init()
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'param_groups'"):
        handle.wrap_optimizer(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="num_loss"):
        handle.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), num_loss=0)
    with pytest.raises(TypeError, match="num_loss='2'.: expected a whole number, got str"):
        handle.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), num_loss="2")
    handle._deactivate()
    with pytest.raises(ValueError, match="loss_scale"):
        ampatch.init(loss_scale=-1)
