"""Every optimizer of torch.optim in each way it can run, state of any shape, and wrappers."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, data, everything, pass_back, same, seeded
from small_training import train as one_step
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


BF16 = torch.bfloat16


class WithNumbers(torch.optim.SGD):
    """Counts in `state`, beside the parameters' entries; these are plain tensors."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state.setdefault(p, torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 1 / self.state["steps"]), alpha=group["lr"])


class Wrapper:
    """As little as scripts expect of an optimizer; `state` is what it does not show."""

    param_groups = property(lambda self: self.inner.param_groups)

    def __init__(self, optimizer):
        self.inner = optimizer

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class Holder(torch.optim.Optimizer):
    """An Optimizer around another, which it has in a list."""

    inner = property(lambda self: self.held[0])

    def __init__(self, inner):
        self.held = [inner]
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def around(kind):
    return lambda params: kind(torch.optim.Adam(params, lr=0.01))


def train(model, optimizer, steps, scaled=True):
    for number in steps:
        if scaled:
            one_step(model, optimizer, data(number))
            continue
        optimizer.zero_grad()
        F.mse_loss(model(data(number)[0]), data(number)[1]).backward()
        optimizer.step()


# Three FP32 steps, three at the level, three after `deactivate`: one training

KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "numbers in the state": lambda params: WithNumbers(params, lr=0.05),
    "a wrapper": around(Wrapper),
    "an Optimizer that holds it": around(Holder),
}


def entries(state, model):
    results = [state[param] for param in model.parameters()]
    return [dict(entry) if isinstance(entry, dict) else {"value": entry} for entry in results]


def steps_in(state, model):
    return {int(entry["step"]) for entry in entries(state, model) if "step" in entry}


@pytest.mark.parametrize("level", ["O2", "O3"])  # weights keep their dtype, and change it
@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_along(kind, level):
    plain, model = seeded(), seeded()
    reference, optimizer = KINDS[kind](plain.parameters()), KINDS[kind](model.parameters())
    train(plain, reference, range(9), scaled=False)
    train(model, optimizer, range(3), scaled=False)
    state = getattr(optimizer, "inner", optimizer).state
    before, counted = entries(state, model), steps_in(state, model)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    for param, entry, old in zip(model.parameters(), entries(state, model), before, strict=True):
        assert entry.keys() == old.keys()
        for key, value in old.items():
            if isinstance(value, torch.Tensor):
                dtype = value.dtype if key == "step" else param.dtype
                assert entry[key].dtype is dtype and torch.equal(entry[key], value.to(dtype)), key
    train(model, optimizer, range(3, 6))
    ampatch.deactivate()
    train(model, optimizer, range(6, 9), scaled=False)
    assert {id(key) for key in state if key != "steps"} == set(map(id, model.parameters()))
    assert steps_in(state, model) == {count + 6 for count in counted}
    assert state.get("steps", 9) == 9
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03 if level == "O3" else 0.01, rtol=0)


def test_lists_in_the_state_go_along():
    """LBFGS has its history in lists."""
    model = seeded()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(data()[0]), data()[1])
        pass_back(loss, optimizer)
        return loss

    for level, kept in (("O0", torch.float32), ("O3", BF16), ("O1", torch.float32)):
        ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
        optimizer.step(closure)
        history = optimizer.state[model[0].weight]["old_dirs"]
        assert history and {direction.dtype for direction in history} == {kept}


@pytest.mark.parametrize("kind", ["AdamW fused", "a wrapper"])
@pytest.mark.parametrize("adds", [False, True])
def test_the_state_is_what_it_was_where_initialize_fails(adds, kind, monkeypatch):
    """Not only FP32 again: its half copies have lost digits."""
    model = seeded()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, range(2), scaled=False)
    held = getattr(optimizer, "inner", optimizer).state
    before = [(state, dict(state)) for state in held.values()]
    if adds:
        ampatch.initialize(seeded(), [], opt_level="O3", verbosity=0)

    def fail(optimizer):
        if held[model[0].weight]["exp_avg"].dtype is torch.float16:
            raise ValueError("no room")

    monkeypatch.setattr(ampatch.session.session.zero_redundancy, "rebuild_buckets", fail)
    with pytest.raises(ValueError, match="no room"):
        if adds:
            ampatch.add_models(model)
            ampatch.add_optimizers(optimizer)
        else:
            ampatch.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert len(before) == 4
    for state, results in before:
        assert state.keys() == results.keys()
        assert all(state[name] is results[name] for name in results)
