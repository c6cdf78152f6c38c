"""Exceptions and Ctrl-C: nothing is left half done.

`tests/scaling/test_faults_in_blocks.py` strikes at every point of a block.
"""

import math
from unittest import mock

import pytest
import torch
from small_training import (
    InBackward,
    backward,
    close,
    data,
    everything,
    float_grads,
    grads,
    pass_back,
    same,
    seeded,
    start,
)

import ampatch
from ampatch.scaling import gradients

ERRORS = [ValueError, KeyboardInterrupt]  # of `Exception`, and not


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("delay", [False, True])
def test_a_backward_pass_that_raises_leaves_the_earlier_gradients(opt_level, error, delay):
    """With a loss scale; under a scale of 1 a block does no more than FP32 training does."""
    model, optimizer = start(opt_level, loss_scale=128.0)
    backward(model, optimizer, data())
    before, state = [grad.clone() for grad in grads(optimizer)], ampatch.state_dict()
    fail = mock.Mock(side_effect=error)
    handle = model[1].register_forward_hook(lambda _, args, out: InBackward.apply(out, fail))
    loss = model(data(2)[0]).float().sum()
    handle.remove()
    with pytest.raises(error):
        pass_back(loss, optimizer, delay_unscale=delay)
    assert same(grads(optimizer), before) and ampatch.state_dict() == state
    backward(model, optimizer, data(2))
    assert close(grads(optimizer), float_grads(data(), data(2)))


def test_ctrl_c_on_the_way_in_takes_nothing_away(monkeypatch):
    """It strikes at the second optimizer of the block, when the first one is prepared."""
    models = [seeded(0), seeded(1)]
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ampatch.initialize(models, pair, opt_level="O1", verbosity=0, init_scale=1024.0)
    for model, optimizer in zip(models, pair, strict=True):
        backward(model, optimizer, data())
    before = [grad.clone() for optimizer in pair for grad in grads(optimizer)]
    original = gradients.OptimizerGradients.before_block

    def strike(flow):
        if flow.optimizer is pair[1]:
            raise KeyboardInterrupt
        return original(flow)

    loss = models[0](data()[0]).sum() + models[1](data()[0]).sum()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gradients.OptimizerGradients, "before_block", strike)
        with ampatch.scale_loss(loss, pair):
            raise AssertionError("entered")
    assert same([grad for optimizer in pair for grad in grads(optimizer)], before)
    for number, (model, optimizer) in enumerate(zip(models, pair, strict=True)):
        backward(model, optimizer, data(2))
        assert close(grads(optimizer), float_grads(data(), data(2), seed=number))


@pytest.mark.parametrize("scale_lives_on", ["device"], indirect=True)
@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("error", ERRORS)
def test_a_step_that_raised_may_be_tried_again_and_still_skips(error, monkeypatch):
    """A fused step that fails before its kernel must not forget the overflow it was told of."""
    model, optimizer = start("O2", torch.optim.Adam, options={"lr": 0.1, "fused": True})
    backward(model, optimizer, data(), math.inf)

    def strike(*args, **kwargs):
        raise error

    before = [param.detach().clone() for param in ampatch.master_params(optimizer)]
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(torch.optim.Adam, "_init_group", strike)
        optimizer.step()
    assert not hasattr(optimizer, "found_inf") and ampatch.step_counts(optimizer) == (0, 0, 0)
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert same(before, list(ampatch.master_params(optimizer)))


def test_a_block_left_without_a_backward_pass_teaches_the_scale_nothing():
    """`if not loss.isfinite(): continue` is no clean step."""
    model, optimizer = start("O1", growth_interval=2)
    for _ in range(3):
        with ampatch.scale_loss(model(data()[0]).sum(), optimizer):
            continue
    assert ampatch.state_dict() == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}}
    before = everything(model, optimizer)
    optimizer.step()
    assert same(everything(model, optimizer), before) and not ampatch.step_was_skipped(optimizer)


@pytest.mark.parametrize("loss", [3.0, torch.tensor(1), None, torch.ones(())], ids=str)
def test_a_block_that_does_not_begin_leaves_all(loss):
    model, optimizer = start("O2")
    backward(model, optimizer, data())
    before, state = [grad.clone() for grad in grads(optimizer)], ampatch.state_dict()
    ampatch.scale_loss(model(data()[0]).sum(), optimizer)  # never entered
    with pytest.raises((TypeError, RuntimeError), match=r"scale_loss\(loss=|not require grad"):
        pass_back(loss, optimizer)
    assert same(grads(optimizer), before) and ampatch.state_dict() == state
    backward(model, optimizer, data(2))
    assert close(grads(optimizer), float_grads(data(), data(2)))
