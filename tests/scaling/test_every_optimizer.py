"""Every optimizer of torch.optim, in each way it can run: O2 is a loop by hand."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, data, everything, same
from torch import nn
from torch.func import functional_call

import ampatch

SCALE = 256.0

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
ELSEWHERE = {"SparseAdam"}  # takes sparse gradients only: test_parameters.py


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


def trained(name, flags, level=None, dtype=torch.float16, kind="cpu", **settings):
    """Six steps by a level, or by hand: half copies of FP32 weights in each forward.

    Returns the model, the optimizer, and a function for a step on a loss that is multiplied.
    """
    torch.manual_seed(0)
    bias = name != "Muon"  # which takes matrices only
    model = nn.Sequential(nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, 2, bias=bias))
    optimizer = classes()[name](model.to(kind).parameters(), **OPTIONS[name], **flags)
    if level is not None:
        settings = {"init_scale": SCALE, "verbosity": 0, **settings}
        ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, **settings)

    def evaluate(number, factor):
        x, y = (tensor.to(kind) for tensor in data(number))
        optimizer.zero_grad()
        if level is not None:
            return backward(model, optimizer, (x, y), factor).detach()
        copies = {name: param.to(dtype) for name, param in model.named_parameters()}
        loss = F.mse_loss(functional_call(model, copies, x.to(dtype)).float(), y)
        (loss * SCALE).backward()
        for param in model.parameters():
            param.grad /= SCALE
        return loss.detach()

    def step(number, factor=1.0):
        if name == "LBFGS" or (level is not None and number % 2):  # others evaluate it first, once
            optimizer.step(lambda: evaluate(number, factor))
        else:
            evaluate(number, factor)
            optimizer.step()

    for number in range(6):
        step(number)
    return model, optimizer, step


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("name, flags", WAYS)
def test_o2_is_the_loop_by_hand_and_a_skipped_step_changes_nothing(name, flags):
    """Bit for bit; the scale is a power of two, so it rounds nothing."""
    by_hand = list(trained(name, flags)[0].parameters())
    settings = {"loss_scale": SCALE} if name == "LBFGS" else {}  # it takes no dynamic one
    model, optimizer, step = trained(name, flags, "O2", **settings)
    assert same(list(model.parameters()), by_hand)
    assert not same(by_hand, [weight.half().float() for weight in by_hand])
    if name == "LBFGS":
        return
    before = everything(model, optimizer)
    step(8, float("inf"))
    assert ampatch.step_was_skipped(optimizer) and same(before, everything(model, optimizer))


def test_a_step_can_be_differentiated_through_at_o1():
    results = []
    for managed in (False, True):
        weight = torch.full((3,), 2.0).requires_grad_()
        rate = torch.tensor(0.5, requires_grad=True)
        updated = weight * rate
        optimizer = torch.optim.SGD([updated], lr=0.1, momentum=0.9, differentiable=True)
        if managed:
            ampatch.initialize([], optimizer, verbosity=0, loss_scale=1.0)
        updated.grad = (updated * 3).detach()
        optimizer.step()
        results.append(torch.autograd.grad(updated.square().sum(), (weight, rate)))
    assert all(map(torch.equal, *results))


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
        model, *_ = trained(name, flags, level, torch.bfloat16, "cuda")
        results.append([param.detach().clone() for param in model.parameters()])
        ampatch.deactivate()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
