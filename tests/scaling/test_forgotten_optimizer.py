"""Optimizers that `scale_loss` was not given, and steps that came without it, are told of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampatch as amp

SAID = "gradients are used that an ampatch.scale_loss block left scaled"


@pytest.fixture
def pair():
    """A generator and a discriminator with an optimizer each, managed together."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    amp.initialize(models, optimizers, opt_level="O2")
    return models, optimizers


def backward(models, optimizer):
    """The loss goes through both models; only `optimizer` is given."""
    loss = models[1](models[0](torch.ones(2, 4))).float().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def test_a_step_on_gradients_left_scaled_is_said(pair, caplog):
    models, (first, second) = pair
    backward(models, first)
    first.step()
    assert SAID not in caplog.text
    second.step()
    assert SAID in caplog.text and "scale_loss(loss, [first, second])" in caplog.text


def test_so_is_adding_to_them(pair, caplog):
    models, (first, second) = pair
    backward(models, first)
    backward(models, second)
    assert caplog.text.count(SAID) == 1


@pytest.mark.parametrize("zero", ["optimizer", "model", "model, to zero", "by hand"])
def test_a_gan_that_zeroes_them_first_is_left_in_peace(pair, caplog, zero):
    models, (first, second) = pair
    for _ in range(3):
        backward(models, first)
        first.step()
        if zero == "optimizer":
            second.zero_grad()
        elif zero == "by hand":
            for parameter in models[1].parameters():
                parameter.grad = None
        else:
            models[1].zero_grad(set_to_none=zero == "model")
        first.zero_grad()
        backward([lambda x: models[0](x).detach(), models[1]], second)
        second.step()
    assert SAID not in caplog.text


def test_given_both_nothing_is_said(pair, caplog):
    models, optimizers = pair
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(models, optimizers)
        for optimizer in optimizers:
            optimizer.step()
    assert SAID not in caplog.text


# Steps without scale_loss

FORGOT = "came without ampatch.scale_loss"


def trained(**settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, **settings)
    return model, optimizer


def plain_step(model, optimizer):
    model(torch.ones(2, 4)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def scaled_step(model, optimizer, **options):
    with amp.scale_loss(model(torch.ones(2, 4)).float().mean(), optimizer, **options) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_without_scale_loss_is_said_once(caplog):
    model, optimizer = trained(opt_level="O2")
    scaled_step(model, optimizer)
    assert FORGOT not in caplog.text
    for _ in range(3):
        plain_step(model, optimizer)
    assert caplog.text.count(FORGOT) == 1 and "SGD.step() came without" in caplog.text
    assert [r.levelname for r in caplog.records if FORGOT in r.message] == ["WARNING"]


def test_a_step_at_a_learning_rate_of_zero_trains_nothing(caplog):
    """Libraries make an optimizer's state by it."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0
    plain_step(model, optimizer)
    assert FORGOT not in caplog.text


def test_a_second_step_on_the_same_gradients_is_one_without(caplog):
    model, optimizer = trained()
    with amp.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert FORGOT not in caplog.text
    optimizer.step()
    assert FORGOT in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_scale": 1.0},
        {"loss_scale": 128.0},
        {"dtype": torch.bfloat16},
        {"opt_level": "O0"},
        {"enabled": False},
    ],
    ids=str,
)
def test_without_dynamic_scaling_nothing_is_said(settings, caplog):
    model, optimizer = trained(**settings)
    plain_step(model, optimizer)
    assert FORGOT not in caplog.text


def test_steps_with_scale_loss_are_left_in_peace(caplog):
    model, optimizer = trained(opt_level="O2")
    optimizer.step()  # without any gradient, as some do before the first scheduler step
    for options in ({}, {"delay_unscale": True}, {"delay_overflow_check": True}):
        scaled_step(model, optimizer, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert FORGOT not in caplog.text


def test_a_closure_without_it_is_told(caplog):
    model, optimizer = trained()

    def closure():
        loss = model(torch.ones(2, 4)).float().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert FORGOT in caplog.text


def test_an_optimizer_left_out_hears_one_thing_only(pair, caplog):
    models, (first, second) = pair
    backward(models, first)
    second.step()
    assert SAID in caplog.text and FORGOT not in caplog.text


def test_one_of_two_is_left_out_beside_another_sessions(caplog):
    """As many optimizers are given as the session has, but they are not all its own."""
    first = [torch.nn.Linear(3, 1) for _ in range(2)]
    mine = [torch.optim.SGD(model.parameters(), lr=0.1) for model in first]
    other = torch.nn.Linear(3, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    amp.initialize(first, mine, init_scale=8.0)
    amp.initialize(other, theirs, init_scale=8.0)
    loss = sum(model(torch.ones(1, 3)).sum() for model in (*first, other))
    with amp.scale_loss(loss, [theirs, mine[0]]) as scaled:
        scaled.backward()
    caplog.clear()
    mine[1].step()
    assert "left scaled" in caplog.text
