"""The gradients after a `scale_loss` block: alone, accumulated, delayed, for several optimizers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from small_training import (
    backward,
    close,
    data,
    everything,
    float_grads,
    grads,
    same,
    seeded,
    start,
)
from torch import nn

import ampatch

pytestmark = pytest.mark.usefixtures("scale_lives_on")


@pytest.mark.parametrize("scale", [None, 1.0, 1024.0])
def test_gradients_are_the_float_runs(opt_level, half, scale):
    model, optimizer = start(opt_level, dtype=half, loss_scale=scale)
    backward(model, optimizer, data())
    assert close(grads(optimizer), float_grads(data()), half)
    expected = half if opt_level == "O3" else torch.float32
    assert all(grad.dtype is expected for grad in grads(optimizer))


def test_gradients_too_small_for_float16_survive():
    """Unscaled in half they would be 0: 2**-26 is below the smallest float16."""
    for level in ("O1", "O2"):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ampatch.initialize(model, optimizer, opt_level=level, init_scale=2.0**14, verbosity=0)
        with ampatch.scale_loss(model(torch.ones(1, 1)).sum() * 2.0**-26, optimizer) as scaled:
            scaled.backward()
        assert grads(optimizer)[0].item() == 2.0**-26
        ampatch.deactivate()


@pytest.mark.parametrize("delay", [False, True])
def test_accumulation_is_one_big_batch(opt_level, delay):
    model, optimizer = start(opt_level)
    parts = [data(seed) for seed in (1, 2, 3)]
    for index, part in enumerate(parts):
        backward(model, optimizer, part, 1 / 3, delay_unscale=delay and index < 2)
    big = tuple(torch.cat(tensors) for tensors in zip(*parts))
    assert close(grads(optimizer), float_grads(big))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize(
    "plan",
    [
        "d",  # only delayed before the step
        "dd",
        "sd",  # earlier unscaled gradients, then delayed
        "ds",
        "dcd",  # c: the scale changes in between
        "dcs",
        "scd",
        "ddcdsdc",
    ],
)
def test_delay_unscale_in_any_order(plan, level):
    model, optimizer = start(level, options={"lr": 1.0}, loss_scale="dynamic", growth_interval=2)
    before = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    batches = []
    for index, letter in enumerate(plan):
        if letter == "c":
            ampatch.set_loss_scale(ampatch.loss_scale() * 4)
        else:
            batches.append(data(index))
            backward(model, optimizer, batches[-1], 0.1, delay_unscale=letter == "d")
    optimizer.step()
    moved = [a - b.detach() for a, b in zip(before, ampatch.master_params(optimizer), strict=True)]
    assert close(moved, float_grads(*batches, factors=[0.1] * len(batches)))
    assert not ampatch.step_was_skipped(optimizer)


def test_delayed_gradients_stay_scaled_until_then():
    model, optimizer = start("O1")
    backward(model, optimizer, data(), delay_unscale=True)
    scaled = [grad / 1024 for grad in grads(optimizer)]
    assert close(scaled, float_grads(data())) and not close(grads(optimizer), float_grads(data()))


def test_a_delayed_loss_for_two_optimizers_counts_once():
    for bad in (False, True):
        model = seeded()
        pair = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
        ampatch.initialize(model, pair, init_scale=1024.0, verbosity=0)
        backward(model, pair, data(), math.inf if bad else 1.0, delay_unscale=True)
        for optimizer in pair:
            optimizer.step()
            assert ampatch.step_was_skipped(optimizer) is bad
        expected = {"loss_scale": 512.0, "unskipped": 0}
        clean = {"loss_scale": 1024.0, "unskipped": 1}
        assert ampatch.state_dict()["loss_scaler0"] == (expected if bad else clean)
        ampatch.deactivate()


def test_an_overflow_in_a_delayed_block_skips_the_step():
    model, optimizer = start("O2", torch.optim.Adam, options={"lr": 0.01})
    before = everything(model, optimizer)
    backward(model, optimizer, data(1), math.inf, delay_unscale=True)
    backward(model, optimizer, data(2))
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert same(everything(model, optimizer), before) and ampatch.loss_scale() == 512.0


def test_delay_overflow_check():
    """The scale reacts with the next check; the step is skipped all the same."""
    model, optimizer = start("O1")
    backward(model, optimizer, data(), math.inf, delay_overflow_check=True)
    assert ampatch.loss_scale() == 1024.0
    backward(model, optimizer, data(2))
    assert ampatch.loss_scale() == 512.0
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, data(), math.nan, delay_overflow_check=True)
    optimizer.step()  # no other check came
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == 256.0


# Several losses, several optimizers


def test_each_loss_id_has_its_own_scale():
    model, optimizer = start("O2", num_losses=3)
    ampatch.set_loss_scale(256.0, loss_id=2)
    backward(model, optimizer, data(1), loss_id=0)
    backward(model, optimizer, data(2), loss_id=2)
    assert close(grads(optimizer), float_grads(data(1), data(2)))
    backward(model, optimizer, data(3), math.inf, loss_id=1)
    scales = [ampatch.loss_scale(loss_id) for loss_id in range(3)]
    assert scales == [1024.0, 512.0, 256.0]
    assert [ampatch.state_dict()[f"loss_scaler{i}"]["unskipped"] for i in range(3)] == [1, 0, 1]
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)


def test_nested_blocks_of_different_optimizers_unscale_by_their_own_scale():
    """The inner block's overflow moves the scale while the outer one is open."""
    models = [seeded(0), seeded(1)]
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ampatch.initialize(models, pair, init_scale=1024.0, verbosity=0)
    losses = [F.mse_loss(model(data()[0]), data()[1]) for model in models]
    with ampatch.scale_loss(losses[0], pair[0]) as outer:
        with ampatch.scale_loss(losses[1] * math.inf, pair[1]) as inner:
            inner.backward()
        outer.backward()
    assert ampatch.loss_scale() == 512.0
    assert close(grads(pair[0]), float_grads(data()))


def test_nested_blocks_of_one_optimizer_are_refused():
    model, optimizer = start("O1")
    loss = F.mse_loss(model(data()[0]), data()[1])
    with ampatch.scale_loss(loss, optimizer) as scaled:
        with pytest.raises(ampatch.AmpatchError, match="enclosing scale_loss"):
            with ampatch.scale_loss(loss, optimizer):
                raise AssertionError("entered")
        scaled.backward()
    assert close(grads(optimizer), float_grads(data()))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_only_what_it_fed(level):
    models = [seeded(0), seeded(1)]
    pair = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    ampatch.initialize(models, pair, opt_level=level, init_scale=1024.0, verbosity=0)
    before = [everything(*both) for both in zip(models, pair)]
    loss = F.mse_loss(models[0](data()[0]), data()[1]) * math.inf
    loss = loss + F.mse_loss(models[1](data()[0]), data()[1])
    with ampatch.scale_loss(loss, pair) as scaled:
        scaled.backward()
    for optimizer in pair:
        optimizer.step()
    assert [ampatch.step_was_skipped(optimizer) for optimizer in pair] == [True, False]
    after = [everything(*both) for both in zip(models, pair)]
    assert same(after[0], before[0]) and not same(after[1][:4], before[1][:4])
    assert ampatch.loss_scale() == 512.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_listed_twice_counts_once(level):
    model, optimizer = start(level)
    backward(model, [optimizer, optimizer], data())
    assert close(grads(optimizer), float_grads(data()))
    assert ampatch.state_dict()["loss_scaler0"]["unskipped"] == 1
