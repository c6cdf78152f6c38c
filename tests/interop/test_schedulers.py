"""LR schedulers: none warns because of a skip, and those that are held wait."""

from __future__ import annotations

import inspect
import io
import math
import warnings

import pytest
import torch
from small_training import backward, data, everything, same, seeded, start
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


def build(kind, when, *, level="O1", fused=False, **settings):
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
    scheduler = SCHEDULERS[kind](optimizer) if when == "before" else None
    settings = {"loss_scale": "dynamic", "verbosity": 0, **settings}
    ampatch.initialize(model, optimizer, opt_level=level, **settings)
    return model, optimizer, scheduler or SCHEDULERS[kind](optimizer)


def advance(scheduler):
    scheduler.step(1.0) if isinstance(scheduler, torchs.ReduceLROnPlateau) else scheduler.step()


def step(model, optimizer, factor):
    backward(model, optimizer, data(), factor)
    optimizer.step()
    optimizer.zero_grad()
    assert ampatch.step_was_skipped(optimizer) is (factor == BAD)


def plain_rates(kind, steps):
    """The learning rates of plain torch after each of so many steps."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = SCHEDULERS[kind](optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        advance(scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


# Warnings


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_no_scheduler_warns_of_a_skip(kind, when):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, scheduler = build(kind, when)
        for factor in (BAD, BAD, GOOD, BAD, GOOD):
            step(model, optimizer, factor)
            advance(scheduler)
    assert optimizer.param_groups[0]["lr"] == plain_rates(kind, 5)[-1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fused", [False, True])
def test_at_every_level(opt_level, when, fused):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, scheduler = build("StepLR", when, level=opt_level, fused=fused)
        for factor in (BAD, GOOD):
            before = everything(model, optimizer)
            step(model, optimizer, factor)
            after = everything(model, optimizer)[: len(before)]  # a first step adds state
            assert same(before, after) is (factor == BAD)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_skip_in_a_closure_does_not_make_it_warn(when):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, scheduler = build("StepLR", when)
        optimizer.step(lambda: backward(model, optimizer, data(), BAD))
        assert ampatch.step_was_skipped(optimizer)
        scheduler.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_that_comes_too_early_warns_still(when):
    """The warning that has another cause is the user's to see."""
    _, _, scheduler = build("StepLR", when)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


# Held


@pytest.mark.parametrize(
    "kind, when, fused",
    [
        *((kind, "after", False) for kind in SCHEDULERS),
        *(("StepLR", "before", f) for f in (False, True)),
    ],
)
def test_a_held_scheduler_waits(kind, when, fused):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, scheduler = build(kind, when, fused=fused)
        assert ampatch.hold_scheduler(scheduler) is scheduler
        rates = [optimizer.param_groups[0]["lr"]]
        for factor in (BAD, BAD, GOOD, GOOD, BAD, GOOD):
            step(model, optimizer, factor)
            advance(scheduler)
            rates.append(optimizer.param_groups[0]["lr"])
    expected = plain_rates(kind, 3)
    assert rates == [expected[taken] for taken in (0, 0, 0, 1, 2, 2, 3)]


def test_a_schedule_by_epochs_waits_only_for_an_epoch_without_any_step():
    model, optimizer, scheduler = build("StepLR", "after")
    ampatch.hold_scheduler(scheduler)
    rates = []
    for epoch in ([GOOD, BAD], [BAD, BAD], [BAD, GOOD], []):
        for factor in epoch:
            step(model, optimizer, factor)
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.25, 0.125]  # without any step it goes on, as torch's does


def test_only_what_is_held_waits():
    model, optimizer, held = build("ExponentialLR", "after")
    free = torchs.LambdaLR(optimizer, lambda epoch: 1.0)
    ampatch.hold_scheduler(held)
    step(model, optimizer, BAD)
    held.step()
    free.step()
    made_after_a_skip = torchs.ExponentialLR(optimizer, 0.5)
    assert [s.last_epoch for s in (held, free, made_after_a_skip)] == [0, 1, 0]


def test_schedulers_of_two_optimizers_wait_each_for_its_own():
    models = [seeded(0), seeded(1)]
    pair = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    ampatch.initialize(models, pair, verbosity=0)
    schedulers = [ampatch.hold_scheduler(torchs.ExponentialLR(one, 0.5)) for one in pair]
    for model, optimizer, scheduler, factor in zip(models, pair, schedulers, (BAD, GOOD)):
        step(model, optimizer, factor)
        scheduler.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in pair] == [1.0, 0.5]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_holding_leaves_state_signature_and_copies_as_they_are(kind):
    _, _, scheduler = build(kind, "after")
    before, signature = scheduler.state_dict(), inspect.signature(scheduler.step)
    found = type(scheduler).step
    ampatch.hold_scheduler(scheduler)
    assert type(scheduler).step is not found
    assert scheduler.state_dict() == before and inspect.signature(scheduler.step) == signature
    torch.save(scheduler.state_dict(), io.BytesIO())
    ampatch.deactivate()
    assert type(scheduler).step is found


def test_deactivate_lets_it_go_on():
    model, optimizer, scheduler = build("ExponentialLR", "before")
    ampatch.hold_scheduler(scheduler)
    step(model, optimizer, BAD)
    scheduler.step()
    assert scheduler.last_epoch == 0
    ampatch.deactivate()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_another_initialize_keeps_it_held():
    model, optimizer, scheduler = build("ExponentialLR", "before")
    ampatch.hold_scheduler(scheduler)
    step(model, optimizer, GOOD)
    scheduler.step()
    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    step(model, optimizer, BAD)
    scheduler.step()
    assert scheduler.last_epoch == 1
    step(model, optimizer, GOOD)
    scheduler.step()
    assert scheduler.last_epoch == 2


def test_any_object_with_step_and_optimizer_will_do():
    class Own:
        def __init__(self, optimizer):
            self.optimizer, self.count = optimizer, 0

        def step(self, by=1):
            self.count += by
            return self.count

    model, optimizer = start("O1")
    own = ampatch.hold_scheduler(Own(optimizer))
    results = []
    for factor in (BAD, GOOD):
        step(model, optimizer, factor)
        results.append(own.step(by=2))
    assert results == [None, 2]


def test_what_cannot_be_held_is_refused():
    _, optimizer = start("O1")
    scheduler = torchs.ExponentialLR(optimizer, 0.5)
    for wrong in (None, optimizer, "StepLR", torchs.ExponentialLR):
        with pytest.raises(TypeError, match=r"hold_scheduler\(scheduler=\.\.\.\): expected"):
            ampatch.hold_scheduler(wrong)
    scheduler.step = lambda: None
    with pytest.raises(TypeError, match="whose class has step"):
        ampatch.hold_scheduler(scheduler)
    other = torchs.ExponentialLR(torch.optim.SGD(seeded().parameters(), lr=1.0), 0.5)
    with pytest.raises(ampatch.AmpatchError, match="not given to ampatch.initialize"):
        ampatch.hold_scheduler(other)


def test_in_a_disabled_session_nothing_is_held():
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ampatch.initialize(model, optimizer, enabled=False)
    found = torchs.LRScheduler.step
    scheduler = ampatch.hold_scheduler(torchs.ExponentialLR(optimizer, 0.5))
    assert torchs.LRScheduler.step is found and scheduler.last_epoch == 0
