"""Optimizers that `scale_loss` was not given, and steps that came without it, are told of."""

import pytest
import torch
from small_training import backward, data, pass_back, start, train
from torch import nn

import ampatch as amp

SAID = "its gradients are still scaled, because they come from an ampatch.scale_loss block"


@pytest.fixture
def pair():
    """A generator and a discriminator with an optimizer each, managed together."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    amp.initialize(models, optimizers, opt_level="O2")
    return models, optimizers


def block(models, optimizer):
    """The loss goes through both models; only `optimizer` is given."""
    loss = models[1](models[0](torch.ones(2, 4))).float().mean()
    pass_back(loss, optimizer)


@pytest.mark.parametrize("uses", ["steps", "adds"])
def test_a_use_of_gradients_left_scaled_is_said(pair, caplog, uses):
    models, (first, second) = pair
    block(models, first)
    first.step()
    assert SAID not in caplog.text
    if uses == "adds":
        block(models, second)
    second.step()
    assert caplog.text.count(SAID) == 1 and "scale_loss(loss, [first, second])" in caplog.text
    assert FORGOT not in caplog.text  # one thing only


@pytest.mark.parametrize("zero", ["optimizer", "model", "model, to zero", "by hand"])
def test_a_gan_that_zeroes_them_first_is_left_in_peace(pair, caplog, zero):
    models, (first, second) = pair
    for _ in range(3):
        block(models, first)
        first.step()
        if zero == "optimizer":
            second.zero_grad()
        elif zero == "by hand":
            for parameter in models[1].parameters():
                parameter.grad = None
        else:
            models[1].zero_grad(set_to_none=zero == "model")
        first.zero_grad()
        block([lambda x: models[0](x).detach(), models[1]], second)
        second.step()
    assert SAID not in caplog.text


def test_given_both_nothing_is_said(pair, caplog):
    models, optimizers = pair
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        block(models, optimizers)
        for optimizer in optimizers:
            optimizer.step()
    assert SAID not in caplog.text


FORGOT = "without an ampatch.scale_loss block"


def plain(model, optimizer):
    model(torch.ones(2, 4)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def again(model, optimizer):
    train(model, optimizer)
    optimizer.step()


def in_a_closure(model, optimizer):
    def closure():
        loss = model(torch.ones(2, 4)).float().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def at_a_rate_of_zero(model, optimizer):
    """Libraries make an optimizer's state by it."""
    optimizer.param_groups[0]["lr"] = 0
    plain(model, optimizer)


def with_blocks(model, optimizer):
    for options in ({}, {"delay_unscale": True}, {"delay_overflow_check": True}):
        train(model, optimizer, **options)
    optimizer.zero_grad()
    optimizer.step()  # without any gradient, as some do before the first scheduler step
    optimizer.step(lambda: backward(model, optimizer, data()))


@pytest.mark.parametrize(
    "act, level, settings, count",
    [
        (plain, "O1", {}, 1),
        (plain, "O2", {}, 1),
        (again, "O1", {}, 1),
        (in_a_closure, "O1", {}, 1),
        (at_a_rate_of_zero, "O1", {}, 0),
        (with_blocks, "O2", {}, 0),
        (plain, "O1", {"loss_scale": 1.0}, 0),
        (plain, "O1", {"loss_scale": 128.0}, 0),
        (plain, "O1", {"dtype": torch.bfloat16}, 0),
        (plain, "O0", {}, 0),
        (plain, "O1", {"enabled": False}, 0),
    ],
)
def test_a_step_without_scale_loss_under_a_dynamic_scale_is_said_once(
    act, level, settings, count, caplog
):
    model, optimizer = start(level, verbosity=1, **settings)
    train(model, optimizer)
    assert FORGOT not in caplog.text
    optimizer.zero_grad()
    for _ in range(3):
        act(model, optimizer)
    said = [record for record in caplog.records if FORGOT in record.getMessage()]
    assert len(said) == count
    assert all(r.levelname == "WARNING" and "SGD.step() without" in r.getMessage() for r in said)


def test_one_of_two_is_left_out_beside_another_sessions(caplog):
    """As many optimizers are given as the session has, but they are not all its own."""
    first = [torch.nn.Linear(3, 1) for _ in range(2)]
    mine = [torch.optim.SGD(model.parameters(), lr=0.1) for model in first]
    other = torch.nn.Linear(3, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    amp.initialize(first, mine, init_scale=8.0)
    amp.initialize(other, theirs, init_scale=8.0)
    loss = sum(model(torch.ones(1, 3)).sum() for model in (*first, other))
    pass_back(loss, [theirs, mine[0]])
    caplog.clear()
    mine[1].step()
    assert "still scaled" in caplog.text
