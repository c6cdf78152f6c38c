"""`step` and `zero_grad` without torch's ranges and hook loops, only where both have no effect."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampatch
from ampatch.scaling.optimizers import bare_calls

LEVELS = ["O0", "O1", "O2", "O3"]


def start(level, kind=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, init_scale=8.0, verbosity=0)
    return model, optimizer


def train(model, optimizer):
    with ampatch.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def frames(act):
    """Names of the Python functions called."""
    names = []
    sys.setprofile(lambda frame, event, _: event == "call" and names.append(frame.f_code.co_name))
    try:
        act()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_recorded_while_no_profiler_runs(level):
    """The gain: plain torch opens a range around each, though no profiler reads it."""
    model, optimizer = start(level)
    train(model, optimizer)
    assert "record_function" not in " ".join(frames(lambda: train(model, optimizer)))
    ampatch.deactivate()
    names = frames(lambda: (optimizer.step(), optimizer.zero_grad()))
    assert names.count("wrapper") == 1, "torch's own wrapper around step has another name by now"


@pytest.mark.parametrize("level", LEVELS)
def test_a_profiler_sees_both_ranges(level):
    model, optimizer = start(level)
    train(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, optimizer)
    seen = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= seen


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("everybodys", [False, True])
def test_hooks_run(level, everybodys):
    model, optimizer = start(level)
    train(model, optimizer)
    seen = []
    pre = lambda *_: seen.append("pre")  # noqa: E731
    post = lambda *_: seen.append("post")  # noqa: E731
    if everybodys:
        handles = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]
    else:
        handles = [
            optimizer.register_step_pre_hook(pre),
            optimizer.register_step_post_hook(post),
        ]
    train(model, optimizer)
    assert seen == ["pre", "post"]
    for handle in handles:
        handle.remove()
    train(model, optimizer)
    assert seen == ["pre", "post"]


@pytest.mark.parametrize("level", LEVELS)
def test_methods_that_others_have_wrapped_are_called(level, monkeypatch):
    """`functools.wraps` hands all torch's marks on to the wrapper, `__wrapped__` too."""
    seen = []

    class Optimizer(torch.optim.SGD):
        pass

    Optimizer([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch has wrapped the class's step

    def noticing(name):
        inner = getattr(Optimizer, name)

        @functools.wraps(inner)
        def wrapper(*args, **kwargs):
            seen.append(name)
            return inner(*args, **kwargs)

        return wrapper

    for name in ("step", "zero_grad"):
        monkeypatch.setattr(Optimizer, name, noticing(name))
    model, optimizer = start(level, Optimizer)
    train(model, optimizer)
    assert seen == ["step", "zero_grad"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheduler_first", [False, True])
def test_schedulers_still_count_steps(level, scheduler_first):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if scheduler_first:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=8.0)
    if not scheduler_first:
        scheduler = StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        train(model, optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("lacking", ["_AROUND_STEPS", "is_profiling"])
def test_a_torch_that_lets_us_see_less_gets_the_whole_call(lacking, monkeypatch):
    model, optimizer = start("O1")
    monkeypatch.setattr(bare_calls, lacking, None if lacking == "_AROUND_STEPS" else lambda: True)
    assert "wrapper" in frames(lambda: train(model, optimizer))


def test_gradients_of_all_groups_are_dropped_and_zeros_are_kept_where_asked():
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model = nn.Sequential(first, second)
    ampatch.initialize(model, optimizer, verbosity=0)
    for kwargs in ({}, {"set_to_none": True}, {"set_to_none": False}):
        with ampatch.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.zero_grad(**kwargs)
        kept = not kwargs.get("set_to_none", True)
        assert all((p.grad is not None) == kept for p in model.parameters())
        assert not kept or not any(p.grad.any() for p in model.parameters())


class Around:
    """Not a torch optimizer, with the methods of one it holds."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.step, self.zero_grad = inner.step, inner.zero_grad


class Subclass(torch.optim.Optimizer):
    """A torch optimizer whose methods are those of one it holds."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.step, self.zero_grad = inner.step, inner.zero_grad


@pytest.mark.parametrize("wrapper", [Around, Subclass])
@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_the_methods_of_a_wrapped_optimizer_are_called_on_it(wrapper, level):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    inner, seen = torch.optim.Adam(model.parameters(), lr=0.1), []
    inner.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer = wrapper(inner)
    ampatch.initialize(model, optimizer, opt_level=level, init_scale=8.0, verbosity=0)
    before = model.weight.detach().clone()
    train(model, optimizer)
    assert seen == ["post"] and not torch.equal(model.weight, before)
    assert all(parameter.grad is None for parameter in model.parameters())
