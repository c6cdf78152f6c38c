"""A loss that reaches an optimizer `scale_loss` was not given to leaves scaled gradients there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampatch as amp

SAID = "gradients are used that an ampatch.scale_loss block left scaled"


@pytest.fixture(params=["O1", "O2"])
def pair(request):
    """A generator and a discriminator with an optimizer each, managed together."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    amp.initialize(models, optimizers, opt_level=request.param)
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
