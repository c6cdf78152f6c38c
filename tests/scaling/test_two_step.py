"""SAM-like optimizers: `first_step` perturbs the weights, `second_step` restores and steps."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, close, data, same, seeded, values

import ampatch


class SAM(torch.optim.Optimizer):
    """Foret et al. 2020 (arXiv 2010.01412), Algorithm 1, around an optimizer of torch's.

    It climbs as often as `first_step` is called, and descends to where it began.
    """

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def each(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([param.grad.norm() for _, param in self.each()]).norm()
        for group, param in self.each():
            self.state[param].setdefault("begun", param.detach().clone())
            param.add_(param.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for _, param in self.each():
            param.data = self.state[param].pop("begun")
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
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
}


def start(kind="SGD", level="O2", **settings):
    """A model and its optimizer; at level None without ampatch."""
    model = seeded()
    base, options = BASES[kind]
    optimizer = SAM(model.parameters(), base, rho=0.5, **options)
    if level is not None:
        settings = {"init_scale": 256.0, "verbosity": 0, **settings}
        ampatch.initialize(model, optimizer, opt_level=level, dtype=torch.float16, **settings)
    return model, optimizer


def plain_halves(model, optimizer, step, second_zeroes=True):
    for half in (optimizer.first_step, optimizer.second_step):
        F.mse_loss(model(data(step)[0]), data(step)[1]).backward()
        half(zero_grad=second_zeroes or half == optimizer.first_step)


def by_halves(model, optimizer, step, first=1.0, second=1.0):
    backward(model, optimizer, data(step), first)
    optimizer.first_step(zero_grad=True)
    backward(model, optimizer, data(step), second)
    optimizer.second_step(zero_grad=True)


def by_closure(model, optimizer, step):
    """Also after a plain `backward` through `scale_loss` before the step, as SAM's users write."""
    backward(model, optimizer, data(step))
    optimizer.step(lambda: backward(model, optimizer, data(step)))
    optimizer.zero_grad()


def plain(kind, steps):
    model, optimizer = start(kind, None)
    for step in steps:
        plain_halves(model, optimizer, step)
    return list(model.parameters())


# Halves of SGD at every level are a situation of tests/laws


def test_trains_by_a_closure_as_in_float():
    model, optimizer = start(loss_scale=128.0)
    for step in range(6):
        by_closure(model, optimizer, step)
    assert ampatch.step_counts(optimizer) == (6, 0, 0)
    assert close(values(optimizer), plain("SGD", range(6)))


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
    assert ampatch.step_counts(optimizer) == (6, 1, 0)
    assert close(values(optimizer), plain(kind, range(6)))
    ampatch.deactivate()
    assert not {"step", "first_step", "second_step"} & vars(optimizer).keys()


@pytest.mark.parametrize("where", range(4))
def test_an_overflow_in_any_of_several_climbs_leaves_the_step_out(where):
    """The weights are those from before the first climb.  The last number: the second half."""
    model, optimizer = start()
    weights = values(optimizer)
    for climb in range(3):
        backward(model, optimizer, data(climb), math.inf if climb == where else 1.0)
        optimizer.first_step(zero_grad=True)
    backward(model, optimizer, data(3), math.inf if where == 3 else 1.0)
    optimizer.second_step(zero_grad=True)
    assert ampatch.step_counts(optimizer) == (0, 1, 1)
    assert same(weights, values(optimizer))


def test_gradients_that_were_not_zeroed_are_checked_in_both_halves():
    """inf of the first half is still there in the second, and in the next step's first."""
    model, optimizer = start(level="O1")
    before = values(optimizer)
    backward(model, optimizer, data(), math.inf)
    for _ in range(2):
        optimizer.first_step()
        optimizer.second_step()
    assert ampatch.step_counts(optimizer) == (0, 2, 2)
    assert same(before, values(optimizer))


@pytest.mark.parametrize("half_step", ["first_step", "second_step"])
def test_a_half_inside_the_block_is_refused(half_step):
    model, optimizer = start(level="O1")
    with pytest.raises(ampatch.AmpatchError, match="inside the ampatch.scale_loss block"):
        with ampatch.scale_loss(model(data()[0]).sum(), optimizer) as scaled:
            scaled.backward()
            getattr(optimizer, half_step)()


def test_half_steps_without_scale_loss_are_told(caplog):
    model, optimizer = start(level="O1", verbosity=1)
    by_halves(model, optimizer, 0)
    assert "without an ampatch.scale_loss block" not in caplog.text
    for _ in range(2):
        plain_halves(model, optimizer, 1, second_zeroes=False)
    assert caplog.text.count("SAM.step() without an ampatch.scale_loss block") == 1
