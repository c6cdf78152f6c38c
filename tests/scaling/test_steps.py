"""The step is still the optimizer's: its signature and its result, with scaling and without."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, data, everything, same, seeded, start

import ampatch

pytestmark = pytest.mark.usefixtures("scale_lives_on")


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


# Without scaling


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
