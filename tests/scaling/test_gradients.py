"""Gradients that users touch: zeroed and clipped, within blocks and after them."""

import math

import pytest
import torch
from small_training import backward, data, float_grads, grads, pass_back, same, start

import ampatch


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
