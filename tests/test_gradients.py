"""Gradients that users touch: zeroing, clipping, closures, sparse ones, odd optimizers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_bound_early

import ampatch

UNPATCHED = (clip_bound_early, torch.nn.utils.clip_grad_norm_)  # in a tuple nobody rebinds them


def seeded(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def loss_of(model, seed=1):
    inputs, targets = data(seed)
    return F.mse_loss(model(inputs), targets)


def start(level, kind=torch.optim.SGD, dtype=torch.float16, **options):
    model = seeded()
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1}))
    ampatch.initialize(
        model, optimizer, opt_level=level, dtype=dtype, init_scale=1024.0, verbosity=0
    )
    return model, optimizer


def backward(model, optimizer, seed=1, factor=1.0, **options):
    loss = loss_of(model, seed) * factor
    with ampatch.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors]


# Zeroing


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_leaves_nothing(opt_level, whose, to_none, bad, delayed):
    """Not a gradient, and no memory of scale or overflow: the next step is a fresh one's."""
    model, optimizer = start(opt_level)
    backward(model, optimizer, 1, math.inf if bad else 1.0, delay_unscale=delayed)
    {"model": model, "optimizer": optimizer}[whose].zero_grad(set_to_none=to_none)
    for param in (*model.parameters(), *ampatch.master_params(optimizer)):
        assert param.grad is None or (not to_none and not param.grad.any())
    backward(model, optimizer, 2)
    optimizer.step()

    fresh, fresh_optimizer = start(opt_level)
    ampatch.set_loss_scale(512.0 if bad and not delayed else 1024.0)
    backward(fresh, fresh_optimizer, 2)
    fresh_optimizer.step()
    ours, theirs = ampatch.master_params(optimizer), ampatch.master_params(fresh_optimizer)
    assert all(map(torch.equal, ours, theirs))


def test_plain_backward_and_zero_grad_leave_nothing():
    for whose in ("model", "optimizer"):
        model, optimizer = start("O2", dtype=torch.bfloat16)
        before = values(ampatch.master_params(optimizer))
        loss_of(model).backward()
        {"model": model, "optimizer": optimizer}[whose].zero_grad()
        optimizer.step()
        assert all(map(torch.equal, before, ampatch.master_params(optimizer)))


# Clipping


def float_norm(max_norm):
    """The FP32 run's norm, and its gradients after clipping."""
    model = seeded()
    loss_of(model).backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    return norm, [p.grad * (max_norm / norm) for p in model.parameters()]


CLIPS = {
    "module": lambda *args: torch.nn.utils.clip_grad_norm_(*args),
    "bound early": lambda *args: clip_bound_early(*args),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("through", ["master_params", "model.parameters", "one by one"])
@pytest.mark.parametrize("scaled", [True, False])
def test_clipping_gives_the_float_runs_norm(opt_level, through, clip, scaled):
    model, optimizer = start(opt_level, dtype=torch.bfloat16)
    clip = CLIPS[clip]
    if scaled:
        backward(model, optimizer)
    else:
        loss_of(model).backward()
    norm, expected = float_norm(0.1)
    assert norm > 0.2
    if through == "one by one":
        found = math.sqrt(sum(clip(p, 1e9).item() ** 2 for p in model.parameters()))
        assert found == pytest.approx(norm, rel=0.02)
        return
    params = ampatch.master_params(optimizer) if through == "master_params" else model.parameters()
    assert clip(params, 0.1).item() == pytest.approx(norm, rel=0.02)
    for param, grad in zip(ampatch.master_params(optimizer), expected, strict=True):
        assert torch.allclose(param.grad.float(), grad, atol=0.002)


def test_clip_grad_value(opt_level):
    model, optimizer = start(opt_level)
    backward(model, optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    largest = max(p.grad.abs().max().item() for p in ampatch.master_params(optimizer))
    assert largest == pytest.approx(0.01, rel=1e-3)


def test_names_bound_early_are_given_back():
    model, optimizer = start("O2")
    assert clip_bound_early is not UNPATCHED[0]
    ampatch.deactivate()
    assert (clip_bound_early, torch.nn.utils.clip_grad_norm_) == UNPATCHED


# Closures


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize(
    "kind, options, steps",
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 60),
        (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4}, 12),
        (torch.optim.LBFGS, {"max_iter": 4, "line_search_fn": "strong_wolfe"}, 12),
    ],
)
def test_closures_converge(level, kind, options, steps):
    model, optimizer = start(level, kind, **options)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        seen.append((model[0].weight.dtype, F.linear(torch.ones(1, 4), torch.ones(2, 4)).dtype))
        return loss

    losses = [optimizer.step(closure).item() for _ in range(steps)]
    plain = seeded()
    reference = kind(plain.parameters(), **options)

    def plain_closure():
        reference.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        return loss

    expected = [reference.step(plain_closure).item() for _ in range(steps)]
    assert losses[0] == pytest.approx(expected[0], rel=1e-2)
    assert losses[-1] < losses[0] / 20 and expected[-1] < expected[0] / 20
    half = torch.float16
    wanted = {"O1": (torch.float32, half), "O2": (half, torch.float32)}
    assert set(seen) == {wanted.get(level, (torch.float32, torch.float32))}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
@pytest.mark.parametrize("faulty", [1, 3])
def test_an_overflow_in_a_closure_undoes_the_step(level, kind, faulty):
    """At the first evaluation, and (LBFGS) at a later one: weights and state as before."""
    model, optimizer = start(level, kind, lr=0.1)
    calls, bad = 0, False

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        return backward(model, optimizer, 1, math.inf if bad and calls == faulty else 1.0)

    optimizer.step(closure)
    weights = values((*model.parameters(), *ampatch.master_params(optimizer)))
    state = state_values(optimizer)
    calls, bad = 0, True
    result = optimizer.step(closure)
    hit = calls >= faulty
    assert hit is (faulty == 1 or kind is torch.optim.LBFGS)
    assert ampatch.step_was_skipped(optimizer) is hit
    after = values((*model.parameters(), *ampatch.master_params(optimizer)))
    assert all(map(torch.equal, weights, after)) is hit
    assert all(map(equal, state, state_values(optimizer))) is hit or kind is torch.optim.SGD
    assert ampatch.loss_scale() == (512.0 if hit else 1024.0)
    assert isinstance(result, torch.Tensor)
    bad = False
    before = loss_of(model).item()
    for _ in range(5):
        optimizer.step(closure)
    assert loss_of(model).item() < before and not ampatch.step_was_skipped(optimizer)


def state_values(optimizer):
    found = []
    for state in optimizer.state.values():
        for value in state.values():
            found += list(value) if isinstance(value, list) else [value]
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in found]


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# Sparse gradients, odd optimizers


class Bag(nn.Module):
    def __init__(self, mode=True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 3, sparse=mode)

    def forward(self, indices):
        return self.table(indices).sum(1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("delay", [False, True])
def test_sparse_embeddings(level, kind, delay):
    model, plain = Bag(), Bag()
    optimizer = kind(model.parameters(), lr=0.1)
    reference = kind(plain.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, init_scale=64.0, verbosity=0)
    batches = [torch.tensor([[1, 2, 2]]), torch.tensor([[2, 5, 7]])]
    for step in range(4):
        for index, batch in enumerate(batches):
            loss = model(batch).square().sum() * (math.inf if step == 2 else 1.0)
            with ampatch.scale_loss(loss, optimizer, delay_unscale=delay and index == 0) as scaled:
                scaled.backward()
            if step != 2:
                plain(batch).square().sum().backward()
        before = values(ampatch.master_params(optimizer))
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer) is (step == 2 and level != "O0")
        if step == 2:
            assert level == "O0" or torch.equal(before[0], next(ampatch.master_params(optimizer)))
            if level == "O0":
                return  # a static scale does not look
        else:
            reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    (weight,) = ampatch.master_params(optimizer)
    assert torch.allclose(weight, plain.table.weight, atol=0.02)
    assert torch.equal(weight[0], plain.table.weight[0])  # never looked up


class LARC:
    """A wrapper that is no Optimizer: scales gradients by layer, then has the inner one step."""

    def __init__(self, optimizer, trust=0.02):
        self.optim = optimizer
        self.trust = trust

    @property
    def param_groups(self):
        return self.optim.param_groups

    @property
    def state(self):
        return self.optim.state

    def state_dict(self):
        return self.optim.state_dict()

    def zero_grad(self):
        self.optim.zero_grad()

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm = param.detach().norm() / param.grad.norm()
                    param.grad.mul_(norm * self.trust / group["lr"])
        self.optim.step()


def test_an_optimizer_that_only_looks_like_one(opt_level):
    plain = seeded()
    reference = LARC(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    model = seeded()
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ampatch.initialize(model, optimizer, opt_level=opt_level, init_scale=256.0, verbosity=0)
    for step in range(8):
        if step == 4 and opt_level in ("O1", "O2"):
            backward(model, optimizer, factor=math.nan)
            before = values(ampatch.master_params(optimizer))
            optimizer.step()
            assert ampatch.step_was_skipped(optimizer)
            assert all(map(torch.equal, before, ampatch.master_params(optimizer)))
            optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(plain).backward()
        reference.step()
        reference.zero_grad()
    for ours, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.allclose(ours.float(), theirs, atol=0.01)


def test_gradient_penalty_is_the_float_runs():
    results = {}
    for level in (None, "O0", "O1", "O2"):
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if level:
            ampatch.initialize(model, optimizer, opt_level=level, init_scale=64.0, verbosity=0)
        inputs = data()[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        penalty = (slope.float().norm(dim=1) - 1).square().mean()
        if level:
            with ampatch.scale_loss(penalty, optimizer) as scaled:
                scaled.backward()
            results[level] = [p.grad for p in ampatch.master_params(optimizer)]
        else:
            penalty.backward()
            results[level] = [p.grad for p in model.parameters()]
        ampatch.deactivate()
    for level in ("O0", "O1", "O2"):
        for ours, theirs in zip(results[level], results[None], strict=True):
            if theirs is None:
                assert ours is None or not ours.any()
            else:
                assert torch.allclose(ours, theirs, atol=5e-3)
