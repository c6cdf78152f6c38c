"""O2: optimizers with lists and inner optimizers of their own, and unmanaged optimizers."""

from __future__ import annotations

import pytest
import torch
from small_training import data, seeded
from torch import nn

import ampatch

BF16 = torch.bfloat16


class Cached(torch.optim.SGD):
    """Keeps a list of its own, and in a dictionary of lists another."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.mine = [p for group in self.param_groups for p in group["params"]]
        self.by_kind = {"all": [self.mine[0], self.mine[1:]]}
        self.first = self.mine[0]

    @torch.no_grad()
    def step(self, closure=None):
        first, others = self.by_kind["all"]
        assert first is self.mine[0] is self.first
        for p in (first, *others):
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Lookahead(torch.optim.Optimizer):
    """Steps an inner optimizer whose groups are its own; slow weights beside them."""

    def __init__(self, params, lr):
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.inner = [torch.optim.SGD(list(params), lr=lr, momentum=0.5)]

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner[0].step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class InTuple(Cached):
    """Keeps its parameters where nothing could be exchanged."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.fixed = tuple(self.mine)
        self.number = {p: index for index, p in enumerate(self.mine)}


def train(model, optimizer, steps=4, scaled=True):
    for seed in range(steps):
        optimizer.zero_grad()
        inputs, targets = data(seed)
        loss = nn.functional.mse_loss(model(inputs), targets)
        if scaled:
            with ampatch.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()


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


@pytest.mark.parametrize("begun", [0, 2])
def test_state_that_is_no_dictionary_stays(opt_level, begun):
    """What `initialize` finds of it goes on, and comes back if the session closes."""
    plain, model = seeded(), seeded()
    expected, optimizer = (WithNumbers(one.parameters(), lr=0.05) for one in (plain, model))
    train(plain, expected, steps=begun + 4, scaled=False)
    train(model, optimizer, steps=begun, scaled=False)
    options = {"loss_scale": "dynamic", "dtype": BF16, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level=opt_level, **options)
    train(model, optimizer)
    assert optimizer.state["steps"] == begun + 4
    ampatch.deactivate()
    assert optimizer.state["steps"] == begun + 4
    assert all(isinstance(optimizer.state[p], torch.Tensor) for p in model.parameters())


@pytest.mark.parametrize("kind", [Cached, Lookahead, InTuple])
def test_lists_and_inner_optimizers_of_an_optimizer(kind):
    """They hold the very weights."""
    plain = seeded()
    train(plain, kind(plain.parameters(), lr=2e-3), scaled=False)
    model = seeded()
    optimizer = kind(model.parameters(), lr=2e-3)
    before = dict(vars(optimizer))
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16)
    train(model, optimizer)
    start = seeded()
    for ours, theirs, old in zip(
        ampatch.master_params(optimizer), plain.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(ours - old, theirs - old, rtol=0.1, atol=1e-4)
        assert not torch.equal(ours, ours.to(BF16).float())
    ampatch.deactivate()
    assert vars(optimizer).keys() == before.keys()


# Optimizers that initialize was not given


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("made", ["before", "after"])
def test_an_optimizer_it_was_not_given_steps_on_the_weights(made, kind):
    """As one that it was given, to the bit."""
    trained = []
    for is_given in (True, False):
        model = seeded()
        optimizer = kind(model.parameters(), lr=0.01)
        given = optimizer if is_given else None
        ampatch.initialize(model, given, opt_level="O2", dtype=BF16, verbosity=0)
        if made == "after" and not is_given:
            optimizer = kind(model.parameters(), lr=0.01)
        train(model, optimizer, scaled=False)
        trained.append([p.detach().clone() for p in model.parameters()])
        ampatch.deactivate()
    assert all(map(torch.equal, *trained))
    assert not any(map(torch.equal, trained[0], seeded().parameters()))


def test_others_step_as_they_like():
    """FP32 models, masters kept by hand, pure half at O3, a second optimizer that is managed."""
    model, other = seeded(), seeded(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    train(other, theirs, scaled=False)
    pure, half = seeded(2), seeded(3).to(BF16)
    ampatch.initialize(pure, opt_level="O3", dtype=BF16, verbosity=0)
    for some in (pure, half):
        stepping = torch.optim.SGD(some.parameters(), lr=0.1)
        for p in some.parameters():
            p.grad = torch.ones_like(p)
        stepping.step()
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    torch.optim.SGD(copies, lr=0.1).step()
    train(model, optimizer)
