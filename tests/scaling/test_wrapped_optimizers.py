"""Optimizers that only look like one: wrappers with `param_groups` and `step` around a real one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch

BF16 = torch.bfloat16


class Wrapper:
    """As little as scripts expect of an optimizer; `state` is what it does not show."""

    def __init__(self, optimizer):
        self.inner = optimizer

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class Lookahead(torch.optim.Optimizer):
    """An Optimizer around another: every second step goes half way back to the slow weights."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        if not self.state:
            for param in self.param_groups[0]["params"]:
                self.state[param]["slow"] = param.detach().clone()
        result = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for param in self.param_groups[0]["params"]:
                param.lerp_(self.state[param]["slow"], 0.5)
                self.state[param]["slow"].copy_(param)
        return result


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
    return F.mse_loss(model(inputs).float(), targets)


def backward(model, optimizer, step, factor=1.0):
    loss = loss_of(model, step)
    with ampatch.scale_loss(loss * factor, optimizer) as scaled:
        scaled.backward()
    return loss.detach()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, optimizer, step)
        optimizer.step()


def train_plain(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def make(kind, model):
    return kind(torch.optim.Adam(model.parameters(), lr=0.01))


@pytest.mark.parametrize("kind", [Wrapper, Lookahead])
def test_the_inner_state_goes_along(kind, opt_level):
    """Three FP32 steps, three at the level, three after `deactivate`: one training."""
    plain, model = build(), build()
    reference, optimizer = make(kind, plain), make(kind, model)
    train_plain(plain, reference, range(9))
    train_plain(model, optimizer, range(3))
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=BF16, verbosity=0)
    train(model, optimizer, range(3, 6))
    inner = optimizer.inner.state
    assert set(map(id, inner)) == set(map(id, ampatch.master_params(optimizer)))
    assert {int(entry["step"]) for entry in inner.values()} == {6}
    ampatch.deactivate()
    assert set(map(id, inner)) == set(map(id, model.parameters()))
    train_plain(model, optimizer, range(6, 9))
    assert {int(entry["step"]) for entry in inner.values()} == {9}
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03 if opt_level == "O3" else 0.01, rtol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [Wrapper, Lookahead])
def test_an_overflow_in_a_closure(kind, level):
    """Weights and the state of both optimizers are what they were."""
    model = build()
    optimizer = make(kind, model)
    ampatch.initialize(model, optimizer, opt_level=level, init_scale=256.0, verbosity=0)
    factor = 1.0

    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, 0, factor)

    for _ in range(3):
        optimizer.step(closure)
    before = [param.detach().clone() for param in ampatch.master_params(optimizer)]
    state = copy.deepcopy(optimizer.inner.state_dict()["state"])
    factor = float("inf")
    optimizer.step(closure)
    assert ampatch.step_was_skipped(optimizer)
    assert all(map(torch.equal, before, ampatch.master_params(optimizer)))
    after = optimizer.inner.state_dict()["state"]
    assert all(torch.equal(state[i][key], after[i][key]) for i in state for key in state[i])


def test_a_failed_initialize_leaves_the_inner_state(monkeypatch):
    model = build()
    optimizer = make(Wrapper, model)
    train_plain(model, optimizer, range(2))
    before = {id(key): dict(value) for key, value in optimizer.inner.state.items()}

    def fail(self, *args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ampatch.session.session.ManagedModel, "forget_originals", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    after = {id(key): value for key, value in optimizer.inner.state.items()}
    assert before.keys() == after.keys()
    for key, entry in before.items():
        assert all(after[key][name] is value for name, value in entry.items())


class Slots:
    __slots__ = ("param_groups",)

    def step(self):
        pass


def test_an_optimizer_whose_step_cannot_be_replaced_is_refused():
    model = build()
    optimizer = Slots()
    optimizer.param_groups = [{"params": list(model.parameters())}]
    with pytest.raises(TypeError, match="Slots has __slots__, so its step cannot be replaced"):
        ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
