"""Every optimizer of torch.optim, in each way it can run: O2 is a loop by hand, O1 is autocast."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from small_training import same
from torch import nn

import ampatch

BF16, SCALE = torch.bfloat16, 256.0

OPTIONS = {
    "ASGD": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01},
    "LBFGS": {"lr": 0.5, "max_iter": 5},
    "Muon": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
ELSEWHERE = {"SparseAdam"}  # takes sparse gradients only: test_gradients.py


def classes():
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }


def ways():
    """(class, flags) for each of the flags a class has that work on the CPU."""
    for name, kind in classes().items():
        if name not in ELSEWHERE:
            known = inspect.signature(kind).parameters
            yield name, {}
            yield from ((name, {flag: True}) for flag in ("foreach", "fused") if flag in known)


WAYS = [pytest.param(*way, id=" ".join([way[0], *way[1]])) for way in ways()]


def test_none_is_forgotten():
    assert classes().keys() - ELSEWHERE <= OPTIONS.keys()


def make(name, flags, params):
    return classes()[name](list(params), **OPTIONS[name], **flags)


def build(name):
    torch.manual_seed(0)
    bias = name != "Muon"  # which takes matrices only
    return nn.Sequential(nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, 2, bias=bias))


def loss_of(model, step, dtype=None):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
    device = next(model.parameters()).device
    return F.mse_loss(model(inputs.to(device, dtype)).float(), targets.to(device))


def run(optimizer, evaluate, steps):
    """Steps; LBFGS asks for the loss itself."""
    for step in steps:
        optimizer.zero_grad()
        if not isinstance(optimizer, torch.optim.LBFGS):
            evaluate(step)
            optimizer.step()
            continue

        def closure(step=step):
            optimizer.zero_grad()
            return evaluate(step)

        optimizer.step(closure)


def train(name, flags, level, dtype, kind="cpu", **settings):
    model = build(name).to(kind)
    optimizer = make(name, flags, model.parameters())
    settings = {"init_scale": SCALE, "verbosity": 0, **settings}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, **settings)

    def evaluate(step, factor=1.0):
        loss = loss_of(model, step) * factor
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    run(optimizer, evaluate, range(6))
    return model, optimizer, evaluate


def by_hand(name, flags, dtype):
    """Mixed precision as the paper writes it: a half model, float copies, no ampatch."""
    model = build(name)
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    model.to(dtype)
    optimizer = make(name, flags, masters)

    def evaluate(step):
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        model.zero_grad()
        loss = loss_of(model, step, dtype)
        (loss * SCALE).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float() / SCALE
        return loss.detach()

    run(optimizer, evaluate, range(6))
    return masters


def autocast(name, flags):
    model = build(name)
    optimizer = make(name, flags, model.parameters())

    def evaluate(step):
        with torch.autocast("cpu", dtype=BF16):
            loss = loss_of(model, step)
        loss.backward()
        return loss.detach()

    run(optimizer, evaluate, range(6))
    return list(model.parameters())


def everything(model, optimizer):
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    found = [*model.parameters(), *(value for value in values if torch.is_tensor(value))]
    return [value.detach().clone() for value in found]


@pytest.mark.parametrize("name, flags", WAYS)
def test_o2_is_the_loop_by_hand_and_a_skipped_step_changes_nothing(name, flags):
    """Bit for bit; the scale is a power of two, so it rounds nothing."""
    masters = by_hand(name, flags, torch.float16)
    settings = {"loss_scale": SCALE} if name == "LBFGS" else {}  # it takes no dynamic one
    model, optimizer, evaluate = train(name, flags, "O2", torch.float16, **settings)
    assert same(list(model.parameters()), masters)
    assert not same(masters, [master.half().float() for master in masters])
    if name == "LBFGS":
        return
    before = everything(model, optimizer)
    run(optimizer, lambda step: evaluate(step, float("inf")), range(7, 8))
    assert ampatch.step_was_skipped(optimizer)
    assert same(before, everything(model, optimizer))


@pytest.mark.parametrize("name, flags", WAYS)
def test_o1_is_autocast(name, flags):
    model, _, _ = train(name, flags, "O1", BF16)
    ampatch.deactivate()  # the other optimizer is not managed, and calls functions too
    assert same(list(model.parameters()), autocast(name, flags))
    assert not same(list(model.parameters()), list(build(name).parameters()))


def test_differentiable():
    """At O1 a step can be differentiated through, as without ampatch."""
    found = []
    for managed in (False, True):
        weight = torch.full((3,), 2.0).requires_grad_()
        rate = torch.tensor(0.5, requires_grad=True)
        updated = weight * rate
        optimizer = torch.optim.SGD([updated], lr=0.1, momentum=0.9, differentiable=True)
        if managed:
            ampatch.initialize([], optimizer, verbosity=0, loss_scale=1.0)
        updated.grad = (updated * 3).detach()
        optimizer.step()
        found.append(torch.autograd.grad(updated.square().sum(), (weight, rate)))
    assert all(map(torch.equal, *found))


CAPTURABLE = [
    name for name, kind in classes().items() if "capturable" in inspect.signature(kind).parameters
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable(name, level):
    """Its step counts live on the device; the training is the one without the flag."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    results = []
    for flags in ({"capturable": True}, {}):
        model, _, _ = train(name, flags, level, BF16, "cuda")
        results.append([param.detach().clone() for param in model.parameters()])
        ampatch.deactivate()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
