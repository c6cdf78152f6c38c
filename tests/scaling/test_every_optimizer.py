"""Every optimizer of torch.optim, in each way it can run: O2 equals a loop by hand, O1 autocast."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

BF16 = torch.bfloat16

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
    return F.mse_loss(model(inputs.to(dtype)).float(), targets)


def run(optimizer, evaluate, step):
    """One step; LBFGS asks for the loss itself."""
    optimizer.zero_grad()
    if isinstance(optimizer, torch.optim.LBFGS):

        def closure():
            optimizer.zero_grad()
            return evaluate(step)

        optimizer.step(closure)
    else:
        evaluate(step)
        optimizer.step()


def train(name, flags, level, dtype):
    model = build(name)
    optimizer = make(name, flags, model.parameters())
    ampatch.initialize(
        model, optimizer, opt_level=level, dtype=dtype, init_scale=256.0, verbosity=0
    )

    def evaluate(step):
        loss = loss_of(model, step)
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    for step in range(6):
        run(optimizer, evaluate, step)
    return model, optimizer


def by_hand(name, flags, dtype, scale):
    """Mixed precision as the paper writes it: a half model, float copies, no ampatch."""
    model = build(name)
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    model.to(dtype)
    optimizer = make(name, flags, masters)

    def push():
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)

    def evaluate(step):
        push()
        model.zero_grad()
        loss = loss_of(model, step, dtype)
        (loss * scale).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float() / scale
        return loss.detach()

    for step in range(6):
        run(optimizer, evaluate, step)
    push()
    return masters, list(model.parameters())


def autocast(name, flags):
    model = build(name)
    optimizer = make(name, flags, model.parameters())

    def evaluate(step):
        with torch.autocast("cpu", dtype=BF16):
            loss = loss_of(model, step)
        loss.backward()
        return loss.detach()

    for step in range(6):
        run(optimizer, evaluate, step)
    return list(model.parameters())


def same(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


@pytest.mark.parametrize("name, flags", WAYS)
def test_o2_is_the_loop_by_hand(name, flags, half):
    """Bit for bit; the scale is a power of two, so it rounds nothing."""
    masters, weights = by_hand(name, flags, half, 1.0 if half is BF16 else 256.0)
    model, optimizer = train(name, flags, "O2", half)
    assert same(ampatch.master_params(optimizer), masters)
    assert same(model.parameters(), masters)
    assert not same(masters, [weight.float() for weight in weights])


@pytest.mark.parametrize("name, flags", WAYS)
def test_o1_is_autocast(name, flags):
    model, _ = train(name, flags, "O1", BF16)
    ampatch.deactivate()  # the other optimizer is not managed, and calls functions too
    assert same(model.parameters(), autocast(name, flags))
    assert not same(model.parameters(), build(name).parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name, flags", WAYS)
def test_a_skipped_step_changes_nothing(name, flags, level):
    """No weight and no number of the optimizer's state; the next step works."""
    model, optimizer = train(name, flags, level, torch.float16)
    weights = [param.detach().clone() for param in ampatch.master_params(optimizer)]
    state = tensors_of(optimizer)

    def evaluate(step):
        loss = loss_of(model, step) * float("inf")
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    run(optimizer, evaluate, 7)
    assert ampatch.step_was_skipped(optimizer)
    assert same(weights, ampatch.master_params(optimizer))
    assert len(state) == len(tensors_of(optimizer))
    assert all(map(torch.equal, state, tensors_of(optimizer)))


def tensors_of(optimizer):
    found = []
    for entry in optimizer.state.values():
        for value in entry.values():
            found += [value] if isinstance(value, torch.Tensor) else []
    return [value.detach().clone() for value in found]


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


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_capturable(name, level):
    """Its step counts live on the device; the training is the one without the flag."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    if name not in classes() or "capturable" not in inspect.signature(classes()[name]).parameters:
        pytest.skip("has no such flag")
    results = []
    for flags in ({"capturable": True}, {}):
        model = build(name).cuda()
        optimizer = make(name, flags, model.parameters())
        ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(6, 4, device="cuda")).float().square().mean()
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        results.append([param.detach().clone() for param in ampatch.master_params(optimizer)])
        ampatch.deactivate()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
