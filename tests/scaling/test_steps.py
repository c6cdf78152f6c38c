"""The step is still the optimizer's: its signature, its result, its hooks and its ranges.

torch wraps `step` and `zero_grad` in ranges for the profiler and loops over hooks.  They are left
out only where they have no effect.
"""

import functools
import inspect

import pytest
import torch
from frames import entered
from small_training import backward, data, seeded, start, train
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR

import ampatch
from ampatch.torch_private import optimizers as torch_optimizers


class Answers(torch.optim.SGD):
    def step(self, closure=None, *, note: str = "none"):
        """What it does."""
        super().step(closure)
        return {"note": note}


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("level", ["O1", "O3"])  # with a flag of overflow and without
def test_step_returns_what_the_optimizer_returns(level):
    model, optimizer = start(level, Answers)
    backward(model, optimizer, data())
    assert optimizer.step(note="kept") == {"note": "kept"}
    assert optimizer.step.__doc__ == "What it does."


@pytest.mark.parametrize("scheduled", [False, True])
def test_step_keeps_its_signature(scheduled):
    model = seeded()
    optimizer = Answers(model.parameters(), lr=0.1)
    before = inspect.signature(optimizer.step)
    if scheduled:
        StepLR(optimizer, 1)
    ampatch.initialize(model, optimizer, verbosity=0)
    assert inspect.signature(optimizer.step) == before and "note" in before.parameters


def test_nothing_is_recorded_while_no_profiler_runs():
    """The gain: plain torch opens a range around each, though no profiler reads it."""
    model, optimizer = start("O1")
    train(model, optimizer)
    names = [code.co_name for code in entered(train, model, optimizer)]
    assert "record_function" not in " ".join(names)
    ampatch.deactivate()
    codes = entered(lambda: (optimizer.step(), optimizer.zero_grad()))
    wrappers = [code for code in codes if code.co_name == "wrapper"]
    assert len(wrappers) == 1, "torch's own wrapper around step has another name by now"


@pytest.mark.parametrize("lacking", ["CODE_AROUND_STEPS", "is_profiling"])
def test_a_torch_that_lets_us_see_less_gets_the_whole_call(lacking, monkeypatch):
    model, optimizer = start("O1")
    less = None if lacking == "CODE_AROUND_STEPS" else lambda: True
    monkeypatch.setattr(torch_optimizers, lacking, less)
    assert "wrapper" in [code.co_name for code in entered(train, model, optimizer)]


def test_a_profiler_sees_both_ranges():
    model, optimizer = start("O1")
    train(model, optimizer)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        train(model, optimizer)
    seen = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= seen


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_all_optimizers_run(when):
    model, optimizer = start("O1")
    train(model, optimizer)
    seen = []
    register = getattr(torch_optimizer, f"register_optimizer_step_{when}_hook")
    handle = register(lambda *_: seen.append("hook"))
    train(model, optimizer)
    handle.remove()
    train(model, optimizer)
    assert seen == ["hook"]


def test_methods_that_others_have_wrapped_are_called(monkeypatch):
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
    train(*start("O1", Optimizer))
    assert seen == ["zero_grad", "step"]
