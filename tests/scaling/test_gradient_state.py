"""Gradients are complete or wait scaled; where they are, from the block to the step."""

from __future__ import annotations

import pytest
import torch
from small_training import backward, data, grads, start

import ampatch
from ampatch.session.registry import registry


def where(gradients):
    """A block runs; gradients wait scaled; a step has used them."""
    spent = gradients.check is not None and gradients.check.found is None
    return gradients.aside is not None, gradients.scaled is not None, spent


COMPLETE, SPENT = (False, False, False), (False, False, True)
PENDING, IN_BLOCK, IN_BLOCK_PENDING = (
    (False, True, False),
    (True, False, False),
    (True, True, False),
)


def test_a_training_step_from_state_to_state(opt_level):
    """O0 to O3, with a dynamic loss scale."""
    model, optimizer = start(opt_level, loss_scale="dynamic")
    gradients = registry.table.managed(optimizer).gradients
    seen = [where(gradients)]
    with ampatch.scale_loss(model(data()[0]).float().sum(), optimizer) as scaled:
        seen.append(where(gradients))
        scaled.backward()
    seen.append(where(gradients))
    backward(model, optimizer, data(), delay_unscale=True)
    seen.append(where(gradients))
    with ampatch.scale_loss(model(data()[0]).float().sum(), optimizer) as scaled:
        seen.append(where(gradients))
        scaled.backward()
    optimizer.step()
    seen.append(where(gradients))
    optimizer.zero_grad()
    assert [*seen, where(gradients)] == [
        *(COMPLETE, IN_BLOCK, COMPLETE, PENDING, IN_BLOCK_PENDING),
        *(SPENT, COMPLETE),
    ]


@pytest.mark.parametrize("refused", ["step", "scale_loss"])
@pytest.mark.parametrize("waits", [False, True])
def test_what_a_block_refuses_changes_nothing(waits, refused):
    model, optimizer = start("O0", loss_scale=8.0)
    backward(model, optimizer, data(), delay_unscale=waits)
    gradients = registry.table.managed(optimizer).gradients
    with ampatch.scale_loss(model(data()[0]).sum(), optimizer) as scaled:
        scaled.backward()
        before = dict(vars(gradients)), [grad.clone() for grad in grads(optimizer)]
        with pytest.raises(ampatch.AmpatchError, match="SGD.* block"):
            if refused == "step":
                optimizer.step()
            else:
                ampatch.scale_loss(model(data()[0]).sum(), optimizer).__enter__()
        assert vars(gradients) == before[0]
        assert all(map(torch.equal, grads(optimizer), before[1]))


@pytest.mark.parametrize("waits", [False, True])
def test_gradients_zeroed_within_a_block_leave_those_of_its_pass(waits):
    model, optimizer = start("O0", loss_scale=8.0)
    backward(model, optimizer, data(), delay_unscale=waits)
    loss = model(data()[0]).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    with ampatch.scale_loss(loss, optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()
    assert all(map(torch.equal, grads(optimizer), expected))


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
    for factor in (float("inf"), 1.0):
        loss = first(x).sum() * factor + second(x).sum()
        with ampatch.scale_loss(loss, [whole, part]) as scaled:
            if factor == 1.0:
                (second if whose == "model" else part).zero_grad()
            scaled.backward()
    before = first.weight.detach().clone()
    whole.step()
    assert ampatch.step_was_skipped(whole) and torch.equal(before, first.weight)


def test_gradients_that_a_block_is_unscaling_are_left_to_it_when_another_optimizer_steps():
    """They waited together; the one that is in a block of its own is unscaled by that block."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    pair = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    ampatch.initialize(models, pair, opt_level="O0", loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 2)
    loss = models[0](x).sum() + models[1](x).sum()
    with ampatch.scale_loss(loss, pair, delay_unscale=True) as scaled:
        scaled.backward()
    with ampatch.scale_loss(models[0](x).sum(), pair[0]) as scaled:
        pair[1].step()
        assert torch.equal(models[1].weight.grad, x)
        scaled.backward()
    assert torch.equal(models[0].weight.grad, 2 * x)
