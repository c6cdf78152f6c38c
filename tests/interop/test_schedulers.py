"""LR schedulers: none warns because of a skip; a warning is an error in all tests."""

import math

import pytest
import torch
from small_training import backward, data, seeded, train
from torch.optim import lr_scheduler as torchs

import ampatch

SCHEDULERS = {  # torch's classes that have a `step` of their own, and one that has not
    "StepLR": lambda o: torchs.StepLR(o, 1, gamma=0.5),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 5),
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


def plain_rate(kind, steps):
    optimizer = torch.optim.AdamW(seeded().parameters(), lr=1.0)
    scheduler = SCHEDULERS[kind](optimizer)
    for _ in range(steps):
        optimizer.step()
        advance(scheduler)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "kind, when, level, fused",
    [
        *((kind, when, "O1", False) for kind in SCHEDULERS for when in ("before", "after")),
        *(("StepLR", "before", level, True) for level in ("O0", "O1", "O2", "O3")),
    ],
)
def test_no_scheduler_warns_of_a_skip(kind, when, level, fused):
    model, optimizer, scheduler = build(kind, when, level, fused)
    for factor in (BAD, BAD, GOOD, BAD):
        train(model, optimizer, factor=factor)
        assert ampatch.step_was_skipped(optimizer) is (factor == BAD)
        advance(scheduler)
    assert optimizer.param_groups[0]["lr"] == plain_rate(kind, 4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_skip_in_a_closure_does_not_make_it_warn_and_coming_too_early_does(when):
    """The warning that has another cause is the user's to see."""
    model, optimizer, scheduler = build("StepLR", when)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    model, optimizer, scheduler = build("StepLR", when)
    optimizer.step(lambda: backward(model, optimizer, data(), BAD))
    assert ampatch.step_was_skipped(optimizer)
    scheduler.step()
