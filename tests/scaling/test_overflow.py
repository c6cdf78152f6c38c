"""Overflows and exceptions: what is skipped, what is put back, what stays."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from small_training import BAD, backward, close, data, everything, float_grads, grads, same, start

import ampatch

pytestmark = pytest.mark.usefixtures("scale_lives_on")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("through", ["grad", "loss"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_exactly_that_step(level, through, bad, fused):
    options = {"lr": 0.01, "fused": fused}
    model, optimizer = start(level, torch.optim.Adam, options=options)
    for step in range(5):
        before = everything(model, optimizer)
        optimizer.zero_grad()
        loss = F.mse_loss(model(data()[0]), data()[1])
        faulty = step == 2
        with ampatch.scale_loss(
            loss * bad if faulty and through == "loss" else loss, optimizer
        ) as s:
            s.backward()
            if faulty and through == "grad":
                model[2].weight.grad[1, 3] = bad
        scale = ampatch.loss_scale()
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer) is faulty
        assert same(before, everything(model, optimizer)) is faulty
        assert scale == (1024.0 if step < 2 else 512.0)


@pytest.mark.parametrize("half_done", [False, True])
def test_an_exception_in_the_block_puts_the_gradients_back(opt_level, half_done):
    model, optimizer = start(opt_level, loss_scale=64.0)
    backward(model, optimizer, data())
    before = [grad.clone() for grad in grads(optimizer)]
    state = ampatch.state_dict()
    with pytest.raises(KeyError), ampatch.scale_loss(model(data()[0]).sum(), optimizer) as scaled:
        if half_done:
            scaled.backward()
        raise KeyError
    assert same(grads(optimizer), before) and ampatch.state_dict() == state
    weight = next(model.parameters()) if opt_level == "O1" else torch.ones(2, 4)
    out = F.linear(torch.ones(1, 4), weight)
    assert out.dtype is (torch.float16 if opt_level == "O1" else torch.float32)
    backward(model, optimizer, data(2))
    assert close(grads(optimizer), float_grads(data(), data(2)))


def test_an_exception_in_the_first_block_leaves_no_gradients(opt_level):
    """Under a loss scale; without one a block does nothing."""
    model, optimizer = start(opt_level, loss_scale=64.0)
    with pytest.raises(KeyError), ampatch.scale_loss(model(data()[0]).sum(), optimizer) as scaled:
        scaled.backward()
        raise KeyError
    assert grads(optimizer) == [None] * 4 == [param.grad for param in model.parameters()]
    before = everything(model, optimizer)
    optimizer.step()
    assert same(before, everything(model, optimizer))


def test_an_exception_after_a_delayed_block_keeps_what_was_pending():
    model, optimizer = start("O2", options={"lr": 1.0})
    before = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    backward(model, optimizer, data(), delay_unscale=True)
    with pytest.raises(KeyError), ampatch.scale_loss(model(data()[0]).sum(), optimizer):
        raise KeyError
    optimizer.step()
    moved = [a - b.detach() for a, b in zip(before, ampatch.master_params(optimizer), strict=True)]
    assert close(moved, float_grads(data()))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_set_to_none_by_hand_take_the_overflow_with_them(level, fused):
    model, optimizer = start(level, torch.optim.Adam, options={"lr": 0.01, "fused": fused})
    backward(model, optimizer, data(), BAD[0])
    for parameter in ampatch.master_params(optimizer):
        parameter.grad = None
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)
    assert ampatch.step_counts(optimizer) == (1, 0, 0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_inf_that_horovod_averages_into_gradients_skips_the_step(monkeypatch, level):
    """Its processes are none of `torch.distributed`; alone, the flag of the block decides."""
    for known in (False, True):
        if known:
            monkeypatch.setitem(sys.modules, "horovod.torch", types.ModuleType("horovod.torch"))
        model, optimizer = start(level, options={"lr": 1.0})
        backward(model, optimizer, data())
        next(model.parameters()).grad.fill_(math.inf)
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer) == known
        ampatch.deactivate()
