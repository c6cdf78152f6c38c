"""`scale_loss` and the step: what the gradients are after the block, and which steps happen."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

BAD = [math.inf, -math.inf, math.nan]


def seeded(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(seed=1, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def start(level, kind=torch.optim.SGD, dtype=torch.float16, seed=0, options=None, **settings):
    model = seeded(seed)
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1}))
    settings = {"verbosity": 0, "init_scale": 1024.0, **settings}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, **settings)
    return model, optimizer


def backward(model, optimizer, batch, factor=1.0, **options):
    loss = F.mse_loss(model(batch[0]), batch[1]) * factor
    with ampatch.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss


def grads(optimizer):
    return [param.grad for param in ampatch.master_params(optimizer)]


def float_grads(*batches, seed=0, factors=None):
    """The FP32 run's gradients of the sum of the losses."""
    model = seeded(seed)
    for batch, factor in zip(batches, factors or [1.0] * len(batches), strict=True):
        (F.mse_loss(model(batch[0]), batch[1]) * factor).backward()
    return [param.grad for param in model.parameters()]


def everything(model, optimizer):
    """Copies of all weights and of all optimizer state."""
    found = [*model.parameters(), *model.buffers(), *ampatch.master_params(optimizer)]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in found]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def close(first, second, dtype=torch.float16):
    tolerance = 4e-3 if dtype is torch.float16 else 3e-2
    return len(first) == len(second) and all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        for a, b in zip(first, second, strict=True)
    )


# Gradients after the block


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


# Overflow


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
    model, optimizer = start(opt_level)
    backward(model, optimizer, data())
    before = [grad.clone() for grad in grads(optimizer)]
    state = ampatch.state_dict()
    with pytest.raises(KeyError), ampatch.scale_loss(model(data()[0]).sum(), optimizer) as scaled:
        if half_done:
            scaled.backward()
        raise KeyError
    assert same(grads(optimizer), before) and ampatch.state_dict() == state
    out = F.linear(torch.ones(1, 4), torch.ones(2, 4))
    assert out.dtype is (torch.float16 if opt_level == "O1" else torch.float32)
    backward(model, optimizer, data(2))
    assert close(grads(optimizer), float_grads(data(), data(2)))


def test_an_exception_in_the_first_block_leaves_no_gradients(opt_level):
    model, optimizer = start(opt_level)
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
    with pytest.raises(KeyError), ampatch.scale_loss(model(data()[0]).sum(), optimizer) as scaled:
        scaled.backward()
        raise KeyError
    optimizer.step()
    moved = [a - b.detach() for a, b in zip(before, ampatch.master_params(optimizer), strict=True)]
    assert close(moved, float_grads(data()))


def test_backward_without_scale_loss_counts():
    """apex's O2 stepped with nothing."""
    model, optimizer = start("O2", dtype=torch.bfloat16, options={"lr": 0.1})
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(model(data()[0]), data()[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plain, losses_plain = seeded(), []
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(40):
        reference.zero_grad()
        loss = F.mse_loss(plain(data()[0]), data()[1])
        loss.backward()
        reference.step()
        losses_plain.append(loss.item())
    assert losses_plain[-1] < losses_plain[0] / 2
    assert losses == pytest.approx(losses_plain, abs=0.03)


def test_enabled_false_is_plain_torch():
    results = []
    for enabled in (False, None):
        model = seeded()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = optimizer.step
        if enabled is not None:
            found = ampatch.initialize(model, optimizer, enabled=enabled, opt_level="O2")
            assert found == (model, optimizer) and optimizer.step == step
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data()[0]), data()[1])
            scaling = ampatch.scale_loss if enabled is not None else contextlib.nullcontext
            arguments = (loss, optimizer) if enabled is not None else (loss,)
            with scaling(*arguments) as scaled:
                assert scaled is loss
                scaled.backward()
            optimizer.step()
        results.append(everything(model, optimizer) if enabled is None else results_of(model))
    assert same(results[0], results[1][: len(results[0])])


def results_of(model):
    return [param.detach().clone() for param in model.parameters()]


# The step is still the optimizer's


class Answers(torch.optim.SGD):
    """An optimizer whose step has arguments and an answer of its own."""

    def step(self, closure=None, *, note: str = "none"):
        """What it does."""
        super().step(closure)
        return {"note": note}


def test_step_returns_what_the_optimizer_returns(opt_level):
    model, optimizer = start(opt_level, Answers)
    backward(model, optimizer, data())
    assert optimizer.step(note="kept") == {"note": "kept"}
    assert optimizer.step.__doc__ == "What it does."


@pytest.mark.parametrize("scheduled", [False, True])
def test_step_keeps_its_signature(scheduled):
    model = seeded()
    optimizer = Answers(model.parameters(), lr=0.1)
    before = inspect.signature(optimizer.step)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ampatch.initialize(model, optimizer, verbosity=0)
    assert inspect.signature(optimizer.step) == before and "note" in before.parameters


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fused", [False, True])
def test_schedulers_do_not_warn_of_a_skip(opt_level, when, fused):
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
    make = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = make() if when == "before" else None
        ampatch.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic", verbosity=0)
        scheduler = scheduler or make()
        for factor in (math.inf, 1e-3):
            backward(model, optimizer, data(), factor)
            before = everything(model, optimizer)
            optimizer.step()
            skipped = factor == math.inf
            assert ampatch.step_was_skipped(optimizer) is skipped
            after = everything(model, optimizer)[: len(before)]  # a first step adds state
            assert same(before, after) is skipped
            optimizer.zero_grad()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
