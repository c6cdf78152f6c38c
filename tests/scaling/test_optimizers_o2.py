"""O2: optimizers with lists and inner optimizers of their own, and unmanaged optimizers."""

from __future__ import annotations

import pytest
import torch
from small_training import data, seeded
from torch import nn

import ampatch

BF16 = torch.bfloat16
SAID = "changed no FP32 master weight"


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
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.fixed = tuple(self.mine)


class ByParameter(Cached):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.number = {p: index for index, p in enumerate(self.mine)}


class Elsewhere(torch.optim.SGD):
    """Updates parameters that cannot be found."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.held = lambda: params

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.held():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.1)


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


@pytest.mark.parametrize("kind", [Cached, Lookahead])
def test_lists_and_inner_optimizers_are_taken_along(kind, caplog):
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
    assert SAID not in caplog.text
    ampatch.deactivate()
    held = {id(p) for p in model.parameters()}
    if kind is Cached:
        assert {id(p) for p in optimizer.mine} == held and optimizer.mine is before["mine"]
    else:
        assert {id(p) for p in optimizer.inner[0].param_groups[0]["params"]} == held
        assert {id(p) for p in optimizer.inner[0].state} == held
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == held


@pytest.mark.parametrize(("kind", "name"), [(InTuple, ".fixed"), (ByParameter, ".number")])
def test_what_cannot_be_exchanged_is_refused_by_name(kind, name):
    model = seeded()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(ampatch.AmpatchError, match=f"{kind.__name__}{name} keeps parameters"):
        ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert not ampatch.session.session.registry.sessions
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {id(p) for p in optimizer.mine} == {id(p) for p in model.parameters()}
    train(model, optimizer, scaled=False)
    ampatch.initialize(model, optimizer, opt_level="O1", verbosity=0)  # weights stay FP32


@pytest.mark.parametrize("bad", [True, False], ids=["moves nothing", "moves"])
def test_a_first_step_that_changes_no_master_is_said_once(bad, caplog):
    model = seeded()
    optimizer = (Elsewhere if bad else torch.optim.SGD)(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16)
    optimizer.step()  # no gradients yet
    train(model, optimizer)
    assert caplog.text.count(SAID) == bad


@pytest.mark.parametrize("what", ["lr 0", "gradients 0", "skipped"])
def test_a_step_that_is_to_change_nothing_is_none_of_those(what, caplog):
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if what == "lr 0" else 0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=64.0)
    factor = {"lr 0": 1.0, "gradients 0": 0.0, "skipped": float("inf")}[what]
    loss = model(data()[0]).square().mean() * factor
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert SAID not in caplog.text


# Optimizers that initialize was not given


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
@pytest.mark.parametrize("made", ["before", "after"])
def test_an_optimizer_it_was_not_given_is_refused_at_its_first_step(made, kind):
    model = seeded()
    optimizer = kind(model.parameters(), lr=0.1)
    ampatch.initialize(model, opt_level="O2", dtype=BF16, verbosity=0)
    if made == "after":
        optimizer = kind(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(data()[0]).square().mean()
    loss.backward()
    with pytest.raises(ampatch.AmpatchError, match="without this optimizer"):
        optimizer.step(lambda: loss)
    assert all(map(torch.equal, model.parameters(), before))
    ampatch.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    if kind is not torch.optim.LBFGS:
        train(model, optimizer)
        assert {p.dtype for p in ampatch.master_params(optimizer)} == {torch.float32}
    ampatch.deactivate()
    kind(model.parameters(), lr=0.1).step(lambda: torch.zeros(()))


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
