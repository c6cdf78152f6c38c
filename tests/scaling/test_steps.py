"""The step is still the optimizer's: its signature, its result, its hooks and its ranges.

torch wraps `step` and `zero_grad` in ranges for the profiler and loops over hooks.  They are left
out only where they have no effect.  A fused kernel may skip the step on the device.
"""

import functools
import inspect
import math

import pytest
import torch
from frames import entered
from small_training import backward, data, seeded, start, step, train
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


# Steps that the device itself skips; other waits are counted by tests/laws/test_accelerator.py


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def training_step(model, optimizer, x, factor=1.0):
    step(model(x).float().square().mean() * factor, optimizer)


FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_fused_sgd_whose_first_step_overflows_has_no_garbage_for_momentum(dampening):
    """torch's kernel leaves the buffer it was to fill uninitialized.  Beside SGD in its loop."""
    results = []
    for fused, factors in ((True, [math.inf, 1.0, 1.0]), (False, [1.0, 1.0])):
        model = two_layers()
        options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "fused": fused}
        optimizer = torch.optim.SGD(model.parameters(), **options)
        ampatch.initialize(model, optimizer, verbosity=0)
        for factor in factors:
            ampatch.set_loss_scale(256.0)
            junk = [torch.full(p.shape, 1e30) for p in model.parameters()]
            del junk  # what uninitialized memory is likely to hold next
            training_step(model, optimizer, torch.ones(1, 4), factor)
        results.append([p.detach().clone() for p in ampatch.master_params(optimizer)])
        ampatch.deactivate()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("scale_lives_on")
def test_a_group_that_is_not_fused_does_not_step_on_inf():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first]}, {"params": [second], "fused": False}]
    optimizer = torch.optim.Adam(groups, lr=0.1, fused=True)
    ampatch.initialize(nn.ParameterList([first, second]), optimizer, verbosity=0)
    step((first + second).sum() * math.inf, optimizer)
    assert ampatch.step_was_skipped(optimizer)
    assert torch.equal(first, torch.ones(3)) and torch.equal(second, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_is_captured_in_a_cuda_graph(kind, level):
    """Replays train, skip on overflow and count, with no wait and no Python."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).cuda()
    optimizer = kind(model.parameters(), lr=0.01, fused=True, capturable=True)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(8, 16, device="cuda")

    def one_step():
        loss = model(x).float().square().mean()
        step(loss, optimizer)
        return loss

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            first = one_step().item()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = one_step()
    before = ampatch.step_counts(optimizer)
    for _ in range(20):
        graph.replay()
    assert loss.item() < first and not ampatch.step_was_skipped(optimizer)
    weights = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    scale, healthy = ampatch.loss_scale(), x.clone()
    x.fill_(math.nan)
    graph.replay()
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == scale / 2
    assert all(map(torch.equal, weights, ampatch.master_params(optimizer)))
    x.copy_(healthy)
    graph.replay()
    counts = ampatch.step_counts(optimizer)
    assert (counts.taken - before.taken, counts.skipped - before.skipped) == (21, 1)


def has_fused_kernel_on_cuda(kind):
    """Not all releases of torch have that of Adagrad."""
    weight = nn.Parameter(torch.ones(1, device="cuda"))
    weight.grad = torch.ones_like(weight)
    try:
        kind([weight], lr=0.1, fused=True).step()
    except RuntimeError:
        return False
    return True


LOOKED_AT = 10
"""Forwards until O2 looks no more for what was written into half weights unseen."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", FUSED)
def test_cuda_itself_sees_no_wait(kind, level):
    """CUDA's own check raises at the first one; the count of skips arrives all the same."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    if not has_fused_kernel_on_cuda(kind):
        pytest.skip("not fused on CUDA in this torch")
    model = two_layers().cuda()
    optimizer = kind(model.parameters(), lr=0.01, fused=True)
    settings = {"max_consecutive_skips": 8, "init_scale": 256.0, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level=level, **settings)
    healthy = torch.randn(3, 4, device="cuda")
    faulty = torch.full_like(healthy, math.nan)

    for _ in range(LOOKED_AT):
        training_step(model, optimizer, healthy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in (healthy, faulty, healthy, *[faulty] * 6, healthy):
            training_step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ampatch.step_counts(optimizer) == (LOOKED_AT + 3, 7, 0)
