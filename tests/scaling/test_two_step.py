"""SAM-like optimizers: `first_step` perturbs the weights, `second_step` restores and steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, data, same, seeded

import ampatch


class SAM(torch.optim.Optimizer):
    """Foret et al. 2020 (arXiv 2010.01412), Algorithm 1, around an optimizer of torch's."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _each(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([param.grad.norm() for _, param in self._each()]).norm()
        for group, param in self._each():
            self.state[param]["old"] = param.detach().clone()
            param.add_(param.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for _, param in self._each():
            param.data = self.state[param]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


BASES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
}


def build(kind, of=SAM):
    model = seeded()
    base, options = BASES[kind]
    return model, of(model.parameters(), base, rho=0.5, **options)


def start(kind, level="O2", half=torch.float16, of=SAM, **settings):
    model, optimizer = build(kind, of)
    settings = {"init_scale": 256.0, "verbosity": 0, **settings}
    ampatch.initialize(model, optimizer, opt_level=level, dtype=half, **settings)
    return model, optimizer


def loss_of(model, step):
    return F.mse_loss(model(data(step)[0]), data(step)[1])


def by_halves(model, optimizer, step, first=1.0, second=1.0):
    backward(model, optimizer, data(step), first)
    optimizer.first_step(zero_grad=True)
    backward(model, optimizer, data(step), second)
    optimizer.second_step(zero_grad=True)


def by_closure(model, optimizer, step, first=1.0, second=1.0):
    """Also after a plain `backward` through `scale_loss` before the step, as SAM's users write."""

    def closure():
        backward(model, optimizer, data(step), second)

    backward(model, optimizer, data(step), first)
    optimizer.step(closure)
    optimizer.zero_grad()


WAYS = {"halves": by_halves, "closure": by_closure}


def plain(kind, steps):
    model, optimizer = build(kind)
    for step in steps:
        loss_of(model, step).backward()
        optimizer.first_step(zero_grad=True)
        loss_of(model, step).backward()
        optimizer.second_step(zero_grad=True)
    return [param.detach() for param in model.parameters()]


def values(optimizer):
    return [param.detach().clone() for param in ampatch.master_params(optimizer)]


def assert_close(found, expected, tolerance=0.01):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("kind", "way", "level"),
    [*((kind, way, "O2") for kind in BASES for way in WAYS), ("SGD", "halves", "O3")],
)
def test_trains_as_in_float(kind, way, level):
    half = torch.bfloat16 if level == "O3" else torch.float16
    settings = {"loss_scale": 128.0} if way == "closure" else {}  # it calls the closure itself
    model, optimizer = start(kind, level, half, **settings)
    for step in range(6):
        WAYS[way](model, optimizer, step)
        assert not ampatch.step_was_skipped(optimizer)
    unperturbed, plain_optimizer = build(kind)
    for step in range(6):
        plain_optimizer.zero_grad()
        loss_of(unperturbed, step).backward()
        plain_optimizer.base.step()
    expected = plain(kind, range(6))
    assert_close(values(optimizer), expected, 0.06 if level == "O3" else 0.01)
    apart = max(
        (theirs - other).abs().max().item()
        for theirs, other in zip(expected, unperturbed.parameters(), strict=True)
    )
    assert apart > 2 * 0.01  # the perturbation matters: without it we would not be that close


def test_the_second_forward_sees_the_perturbed_weights():
    """They are `rho` away."""
    model, optimizer = start("SGD")
    before = values(optimizer)
    backward(model, optimizer, data())
    optimizer.first_step(zero_grad=True)
    apart = [(new - old).norm() for new, old in zip(values(optimizer), before, strict=True)]
    assert math.isclose(torch.stack(apart).norm().item(), 0.5, rel_tol=0.01)


@pytest.mark.parametrize("where", ["first", "second", "both"])
@pytest.mark.parametrize("kind, bad", [("SGD", math.inf), ("AdamW fused", math.nan)])
def test_an_overflow_in_either_half_leaves_the_step_out(kind, where, bad):
    """Weights and the base optimizer's state are as before it, to the bit; training goes on."""
    model, optimizer = start(kind)
    for step in range(3):
        by_halves(model, optimizer, step)
    weights = values(optimizer)
    state = [value.clone() for s in optimizer.base.state.values() for value in s.values()]
    factors = {half: bad for half in ("first", "second") if where in (half, "both")}
    by_halves(model, optimizer, 99, **factors)
    assert ampatch.step_was_skipped(optimizer)
    assert same(weights, values(optimizer))
    assert same(state, [value for s in optimizer.base.state.values() for value in s.values()])
    assert ampatch.loss_scale() == (64.0 if where == "both" else 128.0)
    assert all(param.grad is None for param in model.parameters())
    for step in range(3, 6):
        by_halves(model, optimizer, step)
        assert not ampatch.step_was_skipped(optimizer)
    assert_close(values(optimizer), plain(kind, range(6)))


class Climber(SAM):
    """Ascends as often as `first_step` is called, and descends to where it began."""

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        begun = {param: self.state[param].get("begun", param.clone()) for _, param in self._each()}
        super().first_step(zero_grad=zero_grad)
        for param, value in begun.items():
            self.state[param]["begun"] = value

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for _, param in self._each():
            self.state[param]["old"] = self.state[param].pop("begun")
        super().second_step(zero_grad=zero_grad)


@pytest.mark.parametrize("where", range(4))
def test_an_overflow_in_any_of_several_climbs_leaves_the_step_out(where):
    """The weights are those from before the first climb.  The last number: the second half."""
    model, optimizer = start("SGD", of=Climber)
    weights = values(optimizer)
    for climb in range(3):
        backward(model, optimizer, data(climb), math.inf if climb == where else 1.0)
        optimizer.first_step(zero_grad=True)
    backward(model, optimizer, data(3), math.inf if where == 3 else 1.0)
    optimizer.second_step(zero_grad=True)
    assert ampatch.step_counts(optimizer) == (0, 1, 1)
    assert same(weights, values(optimizer))


def test_both_halves_count_as_one_step():
    model, optimizer = start("SGD", "O1")
    by_halves(model, optimizer, 0)
    by_halves(model, optimizer, 1, first=math.inf)
    by_halves(model, optimizer, 2, second=math.nan)
    by_halves(model, optimizer, 3)
    assert ampatch.step_counts(optimizer) == (2, 2, 0)
    ampatch.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    by_closure(model, optimizer, 4)
    assert ampatch.step_counts(optimizer) == (1, 0, 0)


def test_gradients_that_were_not_zeroed_are_checked_in_both_halves():
    """inf of the first half is still there in the second, and in the next step's first."""
    model, optimizer = start("SGD", "O1")
    before = values(optimizer)
    backward(model, optimizer, data(), math.inf)
    optimizer.first_step()
    optimizer.second_step()
    optimizer.first_step()
    optimizer.second_step()
    assert ampatch.step_counts(optimizer) == (0, 2, 2)
    assert same(before, values(optimizer))


@pytest.mark.parametrize("half_step", ["first_step", "second_step"])
def test_a_half_inside_the_block_is_refused(half_step):
    model, optimizer = start("SGD", "O1")
    with pytest.raises(ampatch.AmpatchError, match="inside the ampatch.scale_loss block"):
        with ampatch.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
            getattr(optimizer, half_step)()


def test_half_steps_without_scale_loss_are_told(caplog):
    model, optimizer = build("SGD")
    ampatch.initialize(model, optimizer, opt_level="O1")
    by_halves(model, optimizer, 0)
    assert "came without ampatch.scale_loss" not in caplog.text
    for _ in range(2):
        loss_of(model, 1).backward()
        optimizer.first_step(zero_grad=True)
        loss_of(model, 1).backward()
        optimizer.second_step()
    assert caplog.text.count("SAM.step() came without ampatch.scale_loss") == 1


def test_given_back():
    model, optimizer = start("SGD", "O2")
    by_halves(model, optimizer, 0)
    assert {"step", "first_step", "second_step"} <= set(vars(optimizer))
    ampatch.deactivate()
    assert not {"first_step", "second_step"} & set(vars(optimizer))
    loss_of(model, 1).backward()
    optimizer.first_step(zero_grad=True)
    loss_of(model, 1).backward()
    optimizer.second_step(zero_grad=True)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
