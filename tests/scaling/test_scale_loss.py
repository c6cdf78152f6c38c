"""`scale_loss`: what a block leaves in `.grad`, what an overflow skips, what an exception leaves.

Gradients are complete, or wait scaled (`delay_unscale`), or are those of a block that runs.
"""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from small_training import (
    backward,
    close,
    data,
    float_grads,
    grads,
    pass_back,
    same,
    seeded,
    start,
    values,
)

import ampatch

pytestmark = pytest.mark.usefixtures("scale_lives_on")
on_the_host = pytest.mark.parametrize("scale_lives_on", ["host"], indirect=True)


# Several blocks before a step: those without `delay_unscale` are situations of tests/laws

PLANS = ["d", "dd", "sd", "ds", "dcd", "dcs", "scd", "ddcdsdc", "sssfs", "ddfd", "ddfs"]
"""d: a block that delays the unscaling, s: one that does not, c: the scale changes, f: one fails.

If a block raises, what its pass added stays where earlier gradients wait scaled, and under a scale
of 1, as in FP32 training; else it is dropped.
"""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("level", "scale"),
    [("O0", None), ("O2", "dynamic"), ("O3", 128.0)],  # plain, FP32, half grads
)
def test_accumulation_is_one_big_batch(level, scale, plan):
    model, optimizer = start(level, loss_scale=scale, options={"lr": 1.0}, growth_interval=2)
    before, added = values(optimizer), []
    for index, letter in enumerate(plan):
        if letter == "c":
            ampatch.set_loss_scale(ampatch.loss_scale() * 4)
        elif letter == "f":
            with pytest.raises(RuntimeError, match="out of luck"):
                loss = F.mse_loss(model(data(index)[0]), data(index)[1]) * 0.1
                with ampatch.scale_loss(loss, optimizer, delay_unscale=plan[-1] == "d") as scaled:
                    scaled.backward()
                    raise RuntimeError("out of luck")
            added += [data(index)] if scale is None or plan[index - 1] == "d" else []
        else:
            added.append(data(index))
            backward(model, optimizer, added[-1], 0.1, delay_unscale=letter == "d")
    optimizer.step()
    moved = list(map(torch.sub, before, values(optimizer)))
    assert close(moved, float_grads(*added, factors=[0.1] * len(added)))
    assert any(change.any() for change in moved) and not ampatch.step_was_skipped(optimizer)


@on_the_host
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_what_waits_scaled_is_in_the_next_block_as_in_apex(level):
    """A reduction by hand there, here of two ranks that have the same data, is of the whole sum."""
    model, optimizer = start(level, loss_scale="16.0")
    backward(model, optimizer, data(1), delay_unscale=True)
    assert close([grad / 16 for grad in grads(optimizer)], float_grads(data(1)))
    expected = float_grads(data(1), data(2))
    with ampatch.scale_loss(F.mse_loss(model(data(2)[0]), data(2)[1]), optimizer) as scaled:
        scaled.backward()
        for param, whole in zip(model.parameters(), expected, strict=True):
            assert torch.allclose(param.grad.float(), 16 * whole, atol=0.1, rtol=0.02)
            param.grad.data.mul_(2)
    for param, whole in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(param.grad.float(), 2 * whole, atol=8e-3, rtol=0.02)


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


@pytest.mark.parametrize("zeroes", [False, True])
def test_delay_overflow_check(zeroes):
    """The scale reacts with the next check; the step is skipped unless they were zeroed."""
    model, optimizer = start("O1")
    backward(model, optimizer, data(), math.inf, delay_overflow_check=True)
    assert ampatch.loss_scale() == 1024.0
    backward(model, optimizer, data(2))
    assert ampatch.loss_scale() == 512.0
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, data(), math.nan, delay_overflow_check=True)
    if zeroes:
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # no other check came
    assert ampatch.step_was_skipped(optimizer) is not zeroes and ampatch.loss_scale() == 256.0


def test_an_inf_that_horovod_averages_into_gradients_skips_the_step(monkeypatch):
    """Its processes are none of `torch.distributed`; alone, the flag of the block decides."""
    for known in (False, True):
        if known:
            monkeypatch.setitem(sys.modules, "horovod.torch", types.ModuleType("horovod.torch"))
        model, optimizer = start("O1", options={"lr": 1.0})
        backward(model, optimizer, data())
        next(model.parameters()).grad.fill_(math.inf)
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer) == known
        ampatch.deactivate()


def test_nested_blocks_of_different_optimizers_unscale_by_their_own_scale():
    """The inner block's overflow moves the scale while the outer one is open."""
    models = [seeded(0), seeded(1)]
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ampatch.initialize(models, pair, init_scale=1024.0, verbosity=0)
    losses = [F.mse_loss(model(data()[0]), data()[1]) for model in models]
    with ampatch.scale_loss(losses[0], pair[0]) as outer:
        pass_back(losses[1] * math.inf, pair[1])
        outer.backward()
    assert ampatch.loss_scale() == 512.0
    assert close(grads(pair[0]), float_grads(data()))


@on_the_host
def test_gradients_that_a_block_is_unscaling_are_left_to_it_when_another_optimizer_steps():
    """They waited together; the one that is in a block of its own is unscaled by that block."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    pair = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    ampatch.initialize(models, pair, opt_level="O0", loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 2)
    loss = models[0](x).sum() + models[1](x).sum()
    pass_back(loss, pair, delay_unscale=True)
    with ampatch.scale_loss(models[0](x).sum(), pair[0]) as scaled:
        pair[1].step()
        assert torch.equal(models[1].weight.grad, x)
        scaled.backward()
    assert torch.equal(models[0].weight.grad, 2 * x)


# Refusals; a step in a block: tests/laws/test_graphs.py, exceptions: test_interruptions.py there


@on_the_host
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("inner_ends", [False, True])
def test_a_block_in_a_block_of_the_same_optimizer_is_refused(waits, inner_ends):
    """As the outer one ends: before, it may as well be one that Ctrl-C has struck."""
    model, optimizer = start("O1", loss_scale=8.0)
    backward(model, optimizer, data(), delay_unscale=waits)
    before = values(optimizer)
    with pytest.raises(ampatch.AmpatchError, match="SGD.*another scale_loss block .* were dropped"):
        with ampatch.scale_loss(F.mse_loss(model(data(2)[0]), data(2)[1]), optimizer) as scaled:
            scaled.backward()
            inner = ampatch.scale_loss(model(data()[0]).sum(), optimizer)
            inner.__enter__().backward()
            if inner_ends:
                inner.__exit__(None, None, None)
    assert grads(optimizer) == [None] * 4
    optimizer.step()
    assert same(before, values(optimizer))
    backward(model, optimizer, data())
    assert close(grads(optimizer), float_grads(data()))


@on_the_host
def test_a_block_that_raises_says_what_stays_in_gradients_that_wait_scaled(caplog):
    model, optimizer = start("O1", loss_scale=16.0, verbosity=1)
    for delayed, said in ((False, False), (True, False), (True, True)):
        with pytest.raises(KeyboardInterrupt):
            with ampatch.scale_loss(model(data()[0]).sum(), optimizer, delay_unscale=delayed):
                raise KeyboardInterrupt
        assert ("These additions stay" in caplog.text) == said
        backward(model, optimizer, data(), delay_unscale=delayed)


# Gradients that users touch: zeroed and clipped, within blocks and after them


@pytest.mark.parametrize("delayed, bad", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_leaves_nothing(whose, to_none, delayed, bad):
    """Not a gradient, and no memory of scale or overflow: the next step is a fresh one's."""
    model, optimizer = start("O2")
    backward(model, optimizer, data(1), math.inf if bad else 1.0, delay_unscale=delayed)
    {"model": model, "optimizer": optimizer}[whose].zero_grad(set_to_none=to_none)
    for grad in grads(optimizer):
        assert grad is None or (not to_none and not grad.any())
    fresh = start("O2", init_scale=ampatch.loss_scale())
    for pair in ((model, optimizer), fresh):
        backward(*pair, data(2))
        pair[1].step()
    assert same(list(model.parameters()), list(fresh[0].parameters()))


@pytest.mark.parametrize("who", [0, 1])
def test_one_optimizer_of_a_block_zeroes_what_it_shares_with_another(who):
    """Of earlier gradients those of its own tensors go, whoever has set them aside."""
    first, second, third = (torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    pair = [
        torch.optim.SGD([first.weight, second.weight], lr=0.1),
        torch.optim.SGD([second.weight, third.weight], lr=0.1),
    ]
    ampatch.initialize([first, second, third], pair, opt_level="O0", loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 2)
    for number in range(2):
        with ampatch.scale_loss((first(x) + second(x) + third(x)).sum(), pair) as scaled:
            if number == 1:
                pair[who].zero_grad()
            scaled.backward()
    passes = [1, 1, 2] if who == 0 else [2, 1, 1]
    assert [layer.weight.grad.tolist() for layer in (first, second, third)] == [
        [[float(count)] * 2] for count in passes
    ]


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_an_overflow_that_is_set_aside_outlives_the_zeroing_of_other_gradients(whose):
    first, second = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))
    whole = torch.optim.SGD([first.weight, second.weight], lr=0.1)
    part = torch.optim.SGD([second.weight], lr=0.1)
    ampatch.initialize(
        [first, second], [whole, part], opt_level="O0", loss_scale="dynamic", verbosity=0
    )
    x = torch.ones(1, 2)
    for factor in (math.inf, 1.0):
        loss = first(x).sum() * factor + second(x).sum()
        with ampatch.scale_loss(loss, [whole, part]) as scaled:
            if factor == 1.0:
                (second if whose == "model" else part).zero_grad()
            scaled.backward()
    before = first.weight.detach().clone()
    whole.step()
    assert ampatch.step_was_skipped(whole) and torch.equal(before, first.weight)


@pytest.mark.parametrize("both", [True, False])
def test_an_overflow_is_forgotten_when_no_gradient_is_left_that_was_not_zeroed(both):
    """Not when a part is zeroed, and another part holds the inf."""
    model, optimizer = start("O1")
    model[0].requires_grad_(both)
    backward(model, optimizer, data(), math.inf)
    model[2].zero_grad(set_to_none=False)
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer) is both


def test_optimizers_that_share_through_a_third_one_skip_together():
    first, second, third = (torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    held = [[first.weight, second.weight], [second.weight, third.weight], [third.weight]]
    several = [torch.optim.SGD(params, lr=0.1) for params in held]
    ampatch.initialize([first, second, third], several, opt_level="O1", verbosity=0)
    pass_back(third(torch.ones(1, 2)).sum() * math.inf, several[0])
    for optimizer in several:
        optimizer.step()
    assert [ampatch.step_was_skipped(optimizer) for optimizer in several] == [False, True, True]


def test_clip_grad_value():
    model, optimizer = start("O2")
    backward(model, optimizer, data(), delay_unscale=True)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    for ours, plain in zip(grads(optimizer), float_grads(data()), strict=True):
        torch.testing.assert_close(ours, plain.clamp(-0.01, 0.01), atol=1e-3, rtol=0)
