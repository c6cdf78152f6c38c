"""Gradients that users touch: zeroing, clipping, accumulation, penalties."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_bound_early

import ampatch

UNPATCHED = (clip_bound_early, torch.nn.utils.clip_grad_norm_)  # a tuple is not rebound


def seeded(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def loss_of(model, seed=1):
    inputs, targets = data(seed)
    return F.mse_loss(model(inputs), targets)


def start(
    level, kind=torch.optim.SGD, dtype=torch.float16, loss_scale=None, verbosity=0, **options
):
    model = seeded()
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1}))
    ampatch.initialize(
        model,
        optimizer,
        opt_level=level,
        dtype=dtype,
        loss_scale=loss_scale,
        init_scale=1024.0,
        verbosity=verbosity,
    )
    return model, optimizer


def backward(model, optimizer, seed=1, factor=1.0, **options):
    loss = loss_of(model, seed) * factor
    with ampatch.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors]


# Zeroing


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_leaves_nothing(opt_level, whose, to_none, bad, delayed):
    """Not a gradient, and no memory of scale or overflow: the next step is a fresh one's."""
    model, optimizer = start(opt_level)
    backward(model, optimizer, 1, math.inf if bad else 1.0, delay_unscale=delayed)
    {"model": model, "optimizer": optimizer}[whose].zero_grad(set_to_none=to_none)
    for param in (*model.parameters(), *ampatch.master_params(optimizer)):
        assert param.grad is None or (not to_none and not param.grad.any())
    backward(model, optimizer, 2)
    optimizer.step()

    fresh, fresh_optimizer = start(opt_level)
    ampatch.set_loss_scale(512.0 if bad and not delayed else 1024.0)
    backward(fresh, fresh_optimizer, 2)
    fresh_optimizer.step()
    ours, theirs = ampatch.master_params(optimizer), ampatch.master_params(fresh_optimizer)
    assert all(map(torch.equal, ours, theirs))


def test_plain_backward_and_zero_grad_leave_nothing():
    for whose in ("model", "optimizer"):
        model, optimizer = start("O2", dtype=torch.bfloat16)
        before = values(ampatch.master_params(optimizer))
        loss_of(model).backward()
        {"model": model, "optimizer": optimizer}[whose].zero_grad()
        optimizer.step()
        assert all(map(torch.equal, before, ampatch.master_params(optimizer)))


# Clipping


def float_norm(max_norm):
    """The FP32 run's norm, and its gradients after clipping."""
    model = seeded()
    loss_of(model).backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    return norm, [p.grad * (max_norm / norm) for p in model.parameters()]


CLIPS = {
    "module": lambda *args: torch.nn.utils.clip_grad_norm_(*args),
    "bound early": lambda *args: clip_bound_early(*args),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("through", ["master_params", "model.parameters", "one by one"])
@pytest.mark.parametrize("scaled", [True, False])
def test_clipping_gives_the_float_runs_norm(opt_level, through, clip, scaled):
    model, optimizer = start(opt_level, dtype=torch.bfloat16)
    clip = CLIPS[clip]
    if scaled:
        backward(model, optimizer)
    else:
        loss_of(model).backward()
    norm, expected = float_norm(0.1)
    assert norm > 0.2
    if through == "one by one":
        found = math.sqrt(sum(clip(p, 1e9).item() ** 2 for p in model.parameters()))
        assert found == pytest.approx(norm, rel=0.02)
        return
    params = ampatch.master_params(optimizer) if through == "master_params" else model.parameters()
    assert clip(params, 0.1).item() == pytest.approx(norm, rel=0.02)
    for param, grad in zip(ampatch.master_params(optimizer), expected, strict=True):
        assert torch.allclose(param.grad.float(), grad, atol=0.002)


def test_clip_grad_value(opt_level):
    model, optimizer = start(opt_level)
    backward(model, optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    largest = max(p.grad.abs().max().item() for p in ampatch.master_params(optimizer))
    assert largest == pytest.approx(0.01, rel=1e-3)


def test_names_bound_early_are_given_back():
    _model, _optimizer = start("O2")
    assert clip_bound_early is not UNPATCHED[0]
    ampatch.deactivate()
    assert (clip_bound_early, torch.nn.utils.clip_grad_norm_) == UNPATCHED


# Accumulation


def accumulated(batches):
    """The gradients of FP32 training: of the sum of the losses, each times its factor."""
    plain = seeded()
    for seed, factor in batches:
        (loss_of(plain, seed) * factor).backward()
    return [parameter.grad for parameter in plain.parameters()]


@pytest.mark.parametrize("delay", ["none", "all but last", "all"])
@pytest.mark.parametrize("middle", ["nothing", "scale change", "left out", "fails"])
def test_accumulation_is_one_big_batch(opt_level, half, delay, middle):
    """Four micro-batches; in the middle the scale moves, or one of them contributes nothing.

    If its block raises, what its pass added stays where earlier gradients wait scaled, and under a
    scale of 1, as in FP32 training; else it is dropped.
    """
    model, optimizer = start(opt_level, dtype=half)
    batches = []
    for index, seed in enumerate((1, 2, 3, 4)):
        delayed = delay == "all" or (delay == "all but last" and index < 3)
        if index == 2 and middle == "scale change":
            ampatch.set_loss_scale(ampatch.loss_scale() / 4)
        if index == 2 and middle == "left out":
            continue
        if index == 2 and middle == "fails":
            with pytest.raises(RuntimeError, match="out of luck"):
                with ampatch.scale_loss(loss_of(model, 9), optimizer, delay_unscale=delayed) as s:
                    s.backward()
                    raise RuntimeError("out of luck")
            is_scaled = opt_level in ("O1", "O2") and half is torch.float16
            batches += [(9, 1.0)] if delayed or not is_scaled else []
            continue
        backward(model, optimizer, seed, 1 / 4, delay_unscale=delayed)
        batches.append((seed, 1 / 4))
    torch.nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1e9)  # unscales what waits
    expected = accumulated(batches)
    for ours, theirs in zip(ampatch.master_params(optimizer), expected, strict=True):
        assert torch.allclose(ours.grad.float(), theirs, atol=4e-3, rtol=0.02)
    before = values(ampatch.master_params(optimizer))
    optimizer.step()
    assert not all(map(torch.equal, before, ampatch.master_params(optimizer)))
    assert not ampatch.step_was_skipped(optimizer)


def test_a_block_that_raises_says_what_stays_in_gradients_that_wait_scaled(caplog):
    model, optimizer = start("O1", loss_scale=16.0, verbosity=1)
    for delayed, said in ((False, False), (True, False), (True, True)):
        with pytest.raises(KeyboardInterrupt):
            with ampatch.scale_loss(loss_of(model), optimizer, delay_unscale=delayed):
                raise KeyboardInterrupt
        assert ("What it added stays there" in caplog.text) == said
        backward(model, optimizer, delay_unscale=delayed)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O3"])
def test_what_waits_scaled_is_in_the_next_block_as_in_apex(opt_level):
    """A reduction by hand there, here of two ranks that have the same data, is of the whole sum."""
    model, optimizer = start(opt_level, loss_scale=16.0)
    backward(model, optimizer, 1, delay_unscale=True)
    with ampatch.scale_loss(loss_of(model, 2), optimizer) as scaled:
        scaled.backward()
        in_block = [p.grad.data for p in model.parameters()]
        expected = accumulated([(1, 1.0), (2, 1.0)])
        for grad, whole in zip(in_block, expected, strict=True):
            assert torch.allclose(grad.float(), 16 * whole, atol=0.1, rtol=0.02)
            grad.mul_(2)
    for param, whole in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(param.grad.float(), 2 * whole, atol=8e-3, rtol=0.02)


@pytest.mark.parametrize("delay", [False, True])
def test_an_overflow_in_one_micro_batch_skips_the_whole_step(half, delay):
    """And nothing of it is left for the next, which is the step of a fresh run."""
    for level in ("O1", "O2"):
        model, optimizer = start(level, dtype=half, loss_scale="dynamic")
        before = values(ampatch.master_params(optimizer))
        for index, factor in enumerate((1.0, math.inf, 1.0)):
            backward(model, optimizer, index, factor, delay_unscale=delay and index < 2)
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer)
        assert all(map(torch.equal, before, ampatch.master_params(optimizer)))
        optimizer.zero_grad()
        scale = ampatch.loss_scale()
        backward(model, optimizer, 5)
        optimizer.step()
        ampatch.deactivate()
        fresh, fresh_optimizer = start(level, dtype=half, loss_scale="dynamic")
        ampatch.set_loss_scale(scale)
        backward(fresh, fresh_optimizer, 5)
        fresh_optimizer.step()
        ours, theirs = ampatch.master_params(optimizer), ampatch.master_params(fresh_optimizer)
        assert all(map(torch.equal, ours, theirs))
        ampatch.deactivate()


# Second order


def slope_penalty(model, inputs):
    """WGAN-GP: the critic's slope at the inputs should be 1."""
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return (slope.float().norm(dim=1) - 1).square().mean()


def scaled_slope_penalty(model, inputs):
    """As torch's recipe has it: through a scaled loss, unscaled by hand."""
    (slope,) = torch.autograd.grad(model(inputs).sum() * 64, inputs, create_graph=True)
    return ((slope.float() / 64).norm(dim=1) - 1).square().mean()


def weight_penalty(model, inputs):
    """The gradient with respect to the weights, as meta-learning takes it."""
    loss = model(inputs).float().square().mean()
    slopes = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
    return sum(slope.float().square().sum() for slope in slopes)


@pytest.mark.parametrize("penalty", [slope_penalty, scaled_slope_penalty, weight_penalty])
def test_gradient_penalty_is_the_float_runs(opt_level, half, penalty):
    model, optimizer = start(opt_level, dtype=half)
    loss = loss_of(model) + penalty(model, data()[0].requires_grad_())
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    plain = seeded()
    expected = loss_of(plain) + penalty(plain, data()[0].requires_grad_())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    for ours, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        largest = theirs.grad.abs().max().item()
        assert torch.allclose(ours.grad.float(), theirs.grad, atol=0.03 * largest)
