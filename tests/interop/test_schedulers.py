"""LR schedulers: none warns because of a skip."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from small_training import backward, data, seeded
from torch.optim import lr_scheduler as torchs

import ampatch

SCHEDULERS = {
    "StepLR": lambda o: torchs.StepLR(o, 1, gamma=0.5),
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda epoch: 0.5**epoch),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.5),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.ConstantLR(o, 0.1, 2), torchs.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o, 0.1, 2), torchs.ExponentialLR(o, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, patience=0),
}
BAD, GOOD = math.inf, 1e-3


def build(kind, when, level="O1", fused=False):
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
    scheduler = SCHEDULERS[kind](optimizer) if when == "before" else None
    ampatch.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    return model, optimizer, scheduler or SCHEDULERS[kind](optimizer)


def advance(scheduler):
    scheduler.step(1.0) if isinstance(scheduler, torchs.ReduceLROnPlateau) else scheduler.step()


def step(model, optimizer, factor):
    backward(model, optimizer, data(), factor)
    optimizer.step()
    optimizer.zero_grad()
    assert ampatch.step_was_skipped(optimizer) is (factor == BAD)


def plain_rate(kind, steps):
    """The learning rate of plain torch after so many steps."""
    optimizer = torch.optim.AdamW(seeded().parameters(), lr=1.0)
    scheduler = SCHEDULERS[kind](optimizer)
    for _ in range(steps):
        optimizer.step()
        advance(scheduler)
    return optimizer.param_groups[0]["lr"]


# Warnings


OTHERS = [(level, fused) for level in ("O0", "O1", "O2", "O3") for fused in (False, True)]


@pytest.mark.parametrize(
    "kind, when, level, fused",
    [
        *((kind, when, "O1", False) for kind in SCHEDULERS for when in ("before", "after")),
        *(("StepLR", "before", *other) for other in OTHERS if other != ("O1", False)),
    ],
)
def test_no_scheduler_warns_of_a_skip(kind, when, level, fused):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, scheduler = build(kind, when, level=level, fused=fused)
        for factor in (BAD, BAD, GOOD, BAD):
            step(model, optimizer, factor)
            advance(scheduler)
    assert optimizer.param_groups[0]["lr"] == plain_rate(kind, 4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_skip_in_a_closure_does_not_make_it_warn_and_coming_too_early_does(when):
    """The warning that has another cause is the user's to see."""
    model, optimizer, scheduler = build("StepLR", when)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, scheduler = build("StepLR", when)
        optimizer.step(lambda: backward(model, optimizer, data(), BAD))
        assert ampatch.step_was_skipped(optimizer)
        scheduler.step()
