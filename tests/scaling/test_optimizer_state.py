"""Optimizer state of any shape, and optimizers around optimizers, through a session."""

import pytest
import torch
import torch.nn.functional as F
from small_training import data, pass_back, seeded
from small_training import train as one_step

import ampatch

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
