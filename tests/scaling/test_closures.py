"""`optimizer.step(closure)`: the optimizer calls the closure late, often, or never.

Trainings at every level against a loop by hand, and exceptions in closures, are in
`tests/laws/situations_optimizers.py`; that torch's own optimizers evaluate it first, once, in
`test_optimizer_state.py`.  Here: these skip as without a closure; LBFGS and the user's own take it
under a static scale, and are refused under a dynamic one.  And SAM, which steps in two halves.
"""

import math
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from small_training import (
    Made,
    backward,
    close,
    data,
    everything,
    float_grads,
    grads,
    managed,
    pass_back,
    same,
    seeded,
    start,
    values,
)
from torch import nn

import ampatch


class ZeroFirst(torch.optim.SGD):
    """Empties the gradients, then asks for them."""

    def step(self, closure):
        self.zero_grad()
        loss = closure()
        super().step()
        return loss


class OfOptions(torch.optim.SGD):
    def step(self, options, check=None):
        options["closure"]()
        check()
        super().step()


STATIC = {"loss_scale": 128.0}


def fails():
    raise AssertionError("the closure is called")


def closure_of(model, optimizer, factor=1.0, batch=None, **options):
    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, batch or data(), factor, **options)

    return closure


def test_a_closure_is_in_the_users_block_around_the_step_also_where_little_is_cast(half):
    """A half model with an FP32 buffer is cast inside only, and `disable_casts()` ends that too."""
    model = Made(lambda self, x: torch.mm(self.first(x), self.shift), first=nn.Linear(4, 4))
    model.register_buffer("shift", torch.eye(4))
    model, optimizer = managed(model, "O2", half)
    x = torch.ones(2, 4)

    def closure():
        pass_back(model(x).square().mean(), optimizer)

    optimizer.step(closure)
    with ampatch.disable_casts():
        with pytest.raises(RuntimeError, match="dtype"):
            optimizer.step(closure)
    optimizer.step(closure)


@pytest.mark.parametrize(("level", "bad", "steps"), [("O1", math.nan, 0), ("O2", math.inf, 2)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(torch.optim.AdamW, fused=True)])
def test_an_overflow_is_one_skipped_step_and_leaves_no_trace(kind, level, bad, steps):
    """With and without a state before; the result is the loss."""
    model, optimizer = start(level, kind)
    for _ in range(steps):
        optimizer.step(closure_of(model, optimizer))
    before, seen = everything(model, optimizer), []
    closure = closure_of(model, optimizer, bad, data(5))
    result = optimizer.step(lambda: seen.append(closure()) or seen[-1])
    assert len(seen) == 1 and result is seen[0]
    assert same(everything(model, optimizer), before)
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == 512.0
    assert ampatch.step_counts(optimizer) == (steps, 1, 1)
    optimizer.step(closure_of(model, optimizer, batch=data(5)))
    assert all(value.isfinite().all() for value in values(optimizer))
    assert not same(everything(model, optimizer), before)


@pytest.mark.parametrize(
    "kind, args, kwargs",
    [
        (torch.optim.LBFGS, (fails,), {}),
        (ZeroFirst, (), {"closure": fails}),
        (OfOptions, ({},), {"check": fails}),
        (OfOptions, ({"closure": fails},), {}),
        (torch.optim.SGD, (fails,), {}),  # patched: what torch promises holds for its own `step`
    ],
)
def test_others_are_refused_under_a_dynamic_scale(kind, args, kwargs, monkeypatch):
    """Wherever the closure stands, and before it runs; gradients, weights and state stay."""
    if kind is torch.optim.SGD:
        monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure: closure())
    model, optimizer = start("O2", kind)
    closure_of(model, optimizer)()
    before, results = everything(model, optimizer), grads(optimizer)
    with pytest.raises(ampatch.AmpatchError) as refusal:
        optimizer.step(*args, **kwargs)
    message = str(refusal.value)
    assert message.startswith(f"{kind.__name__}.step(closure) under a dynamic loss scale: ")
    for part in ("Nothing was changed.", "dtype=torch.bfloat16", "loss_scale=128.0"):
        assert part in message
    assert same(everything(model, optimizer), before)
    assert all(first is two for first, two in zip(results, grads(optimizer), strict=True))
    assert ampatch.step_counts(optimizer) == (0, 0, 0) and ampatch.loss_scale() == 1024.0


def test_gradients_from_before_the_step_count():
    """The closure only runs a forward: earlier gradients' overflow is seen."""
    model, optimizer = start("O2")

    def forward_only():
        with torch.no_grad():
            return F.mse_loss(model(data()[0]).float(), data()[1])

    before = values(optimizer)
    closure_of(model, optimizer, math.inf)()
    optimizer.step(forward_only)
    assert same(values(optimizer), before) and ampatch.step_counts(optimizer) == (0, 1, 1)
    assert not optimizer.state
    closure_of(model, optimizer)()
    optimizer.step(forward_only)
    descent = [old - 0.1 * grad for old, grad in zip(before, float_grads(data()), strict=True)]
    assert close(values(optimizer), descent)
    assert ampatch.step_counts(optimizer) == (1, 1, 0)


def test_closures_in_other_places():
    model, optimizer = start("O1", OfOptions, **STATIC)
    dtypes = []

    def check():
        dtypes.append(F.linear(torch.ones(1, 4), model[0].weight).dtype)

    def closure():
        check()
        return closure_of(model, optimizer)()

    optimizer.step({"closure": closure, "eps": 1.0}, check=check)
    assert dtypes == [torch.float16] * 2
    assert ampatch.step_counts(optimizer) == (1, 0, 0)


def test_a_step_inside_a_step():
    class Around(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params)
            self.inner = torch.optim.LBFGS(self.param_groups[0]["params"], lr=0.1, max_iter=2)

        def step(self, closure):
            return self.inner.step(closure) + 0

    model = seeded()
    optimizer = Around(model.parameters())
    settings = {"opt_level": "O1", "verbosity": 0, **STATIC}
    ampatch.initialize(model, [optimizer, optimizer.inner], **settings)
    losses = [optimizer.step(closure_of(model, optimizer)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert ampatch.step_counts(optimizer) == ampatch.step_counts(optimizer.inner) == (3, 0, 0)


# A class whose step is replaced: that the new one is called is a situation


def test_a_step_of_the_class_replaced_later_is_skipped_and_may_be_a_mock(monkeypatch):
    model, optimizer = start("O2")
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", lambda self, closure=None: "patched")
        closure_of(model, optimizer)()
        assert optimizer.step() == "patched"
        closure_of(model, optimizer, math.inf)()
        assert optimizer.step() is None
    with mock.patch.object(torch.optim.SGD, "step") as mocked:
        closure_of(model, optimizer)()
        optimizer.step()
    mocked.assert_called_once_with()
    before = values(optimizer)
    closure_of(model, optimizer)()
    optimizer.step()
    assert not same(values(optimizer), before)
    assert ampatch.step_counts(optimizer) == (3, 1, 0)


# Two steps: `first_step` perturbs the weights, `second_step` restores and steps


class SAM(torch.optim.Optimizer):
    """Foret et al. 2020 (arXiv 2010.01412), Algorithm 1, around an optimizer of torch's.

    It climbs as often as `first_step` is called, and descends to where it began.
    """

    def __init__(self, params, base, rho, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def trained(self):
        params = [param for group in self.param_groups for param in group["params"]]
        return [param for param in params if param.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([param.grad.norm() for param in self.trained()]).norm()
        for param in self.trained():
            self.state[param].setdefault("begun", param.detach().clone())
            param.add_(param.grad * (self.defaults["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for param in self.trained():
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


def start_sam(kind="SGD", level="O2", **settings):
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


def by_hand(kind, steps):
    model, optimizer = start_sam(kind, None)
    for step in steps:
        plain_halves(model, optimizer, step)
    return list(model.parameters())


# Halves of SGD at every level are a situation of tests/laws


def test_trains_by_a_closure_as_in_float():
    """After a plain `backward` through `scale_loss` before the step, as SAM's users write."""
    model, optimizer = start_sam(loss_scale=128.0)
    for batch in map(data, range(6)):
        backward(model, optimizer, batch)
        optimizer.step(lambda batch=batch: backward(model, optimizer, batch))
        optimizer.zero_grad()
    assert ampatch.step_counts(optimizer) == (6, 0, 0)
    assert close(values(optimizer), by_hand("SGD", range(6)))


@pytest.mark.parametrize("where", ["first", "second", "both"])
@pytest.mark.parametrize("kind, bad", [("SGD", math.inf), ("AdamW fused", math.nan)])
def test_an_overflow_in_either_half_leaves_the_step_out(kind, where, bad):
    """Weights and the base optimizer's state are as before it, to the bit; training goes on."""
    model, optimizer = start_sam(kind)
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
    assert close(values(optimizer), by_hand(kind, range(6)))
    ampatch.deactivate()
    assert not {"step", "first_step", "second_step"} & vars(optimizer).keys()


@pytest.mark.parametrize("where", range(4))
def test_an_overflow_in_any_of_several_climbs_leaves_the_step_out(where):
    """The weights are those from before the first climb.  The last number: the second half."""
    model, optimizer = start_sam()
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
    model, optimizer = start_sam(level="O1")
    before = values(optimizer)
    backward(model, optimizer, data(), math.inf)
    for _ in range(2):
        optimizer.first_step()
        optimizer.second_step()
    assert ampatch.step_counts(optimizer) == (0, 2, 2)
    assert same(before, values(optimizer))


@pytest.mark.parametrize("half_step", ["first_step", "second_step"])
def test_a_half_inside_the_block_is_refused(half_step):
    model, optimizer = start_sam(level="O1")
    with pytest.raises(ampatch.AmpatchError, match="inside the ampatch.scale_loss block"):
        with ampatch.scale_loss(model(data()[0]).sum(), optimizer) as scaled:
            scaled.backward()
            getattr(optimizer, half_step)()


def test_half_steps_without_scale_loss_are_told(caplog):
    model, optimizer = start_sam(level="O1", verbosity=1)
    by_halves(model, optimizer, 0)
    assert "without an ampatch.scale_loss block" not in caplog.text
    for _ in range(2):
        plain_halves(model, optimizer, 1, second_zeroes=False)
    assert caplog.text.count("SAM.step() without an ampatch.scale_loss block") == 1
