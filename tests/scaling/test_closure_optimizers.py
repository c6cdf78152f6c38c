"""The optimizer calls the closure: optimizers that do so late, often, without gradients, or never.

Each trains as in FP32; what an overflow or an exception leaves behind is what was there before.
"""

from __future__ import annotations

import collections
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_training import close, data, everything, same, seeded
from torch import nn

import ampatch
from ampatch.scaling.optimizers.snapshots import Snapshot


class Base(torch.optim.Optimizer):
    """Optimizers of the user's own; `k` counts in the group, `calls` on the optimizer."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0
        self.history = collections.deque(maxlen=3)

    def weights(self):
        return [param for group in self.param_groups for param in group["params"]]

    def count(self):
        self.calls += 1
        self.param_groups[0]["k"] += 1

    def descend(self):
        for param in self.weights():
            param.sub_(param.grad, alpha=self.defaults["lr"])
            state = self.state[param]
            state.setdefault("sums", [torch.zeros_like(param)])[0].add_(param.grad)
            state.setdefault("nested", {"norms": []})["norms"].append(param.grad.norm())
            self.history.append(param.grad.clone())


class ZeroFirst(Base):
    """Empties the gradients, then asks for them."""

    @torch.no_grad()
    def step(self, closure):
        self.count()
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        self.descend()
        return loss


class ZeroFirstByHand(ZeroFirst):
    """As many scripts do it."""

    def zero_grad(self, set_to_none=True):
        for param in self.weights():
            param.grad = None


class Extragradient(Base):
    """Steps with the gradient of where a first step would lead."""

    @torch.no_grad()
    def step(self, closure):
        self.count()
        found = [param.clone() for param in self.weights()]
        with torch.enable_grad():
            loss = closure()
        for param in self.weights():
            param.sub_(param.grad, alpha=self.defaults["lr"])
        with torch.enable_grad():
            closure()
        for param, value in zip(self.weights(), found, strict=True):
            param.copy_(value)
        self.descend()
        return loss


class MoveFirst(Base):
    """Looks ahead before it asks at all."""

    @torch.no_grad()
    def step(self, closure):
        self.count()
        for param in self.weights():
            self.state[param].setdefault("speed", torch.zeros_like(param))
            param.add_(self.state[param]["speed"], alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        for param in self.weights():
            self.state[param]["speed"].mul_(0.5).sub_(param.grad, alpha=self.defaults["lr"])
        self.descend()
        return loss


class SwapsData(Base):
    """Evaluates in other memory, which it puts in the place of the weights'."""

    @torch.no_grad()
    def step(self, closure):
        self.count()
        for param in self.weights():
            self.state[param]["old"] = param.data
            param.data = param.data + 0.01
        with torch.enable_grad():
            loss = closure()
        for param in self.weights():
            param.data = self.state[param].pop("old")
        self.descend()
        return loss


class SamWithHalves(Base):
    """Has SAM's halves, and a `step` that does not use them."""

    @torch.no_grad()
    def first_step(self):
        raise AssertionError

    second_step = first_step

    @torch.no_grad()
    def step(self, closure):
        return Extragradient.step(self, closure)


class Forgiving(Base):
    """Goes on where an evaluation raised."""

    @torch.no_grad()
    def step(self, closure):
        self.count()
        try:
            with torch.enable_grad():
                loss = closure()
        except Exception:
            loss = None
        self.descend()
        return loss


OPTIMIZERS = [
    ZeroFirst,
    ZeroFirstByHand,
    Extragradient,
    MoveFirst,
    SwapsData,
    SamWithHalves,
    Forgiving,
]


def closure_of(model, optimizer, factors=(), zeroes=True, seen=None):
    factors = iter(factors)

    def closure():
        if zeroes:
            optimizer.zero_grad()
        loss = F.mse_loss(model(data()[0]).float(), data()[1]) * next(factors, 1.0)
        if seen is not None:
            seen.append(loss)
        if not ampatch.session.session.registry.sessions:
            loss.backward()
        else:
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        return loss

    return closure


def start(kind, level, half=torch.float16, **settings):
    model = seeded()
    optimizer = kind(model.parameters())
    if level is not None:
        settings = {"init_scale": 1024.0, "verbosity": 0, **settings}
        ampatch.initialize(model, optimizer, opt_level=level, dtype=half, **settings)
    return model, optimizer


def values(optimizer):
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_trains_as_in_float(kind, level, half):
    zeroes = not kind.__name__.startswith("ZeroFirst")
    runs = []
    for where in (None, level):
        model, optimizer = start(kind, where, half)
        seen = []
        for _ in range(5):
            optimizer.step(closure_of(model, optimizer, zeroes=zeroes, seen=seen))
        runs.append((values(optimizer), len(seen), optimizer.calls))
    (plain, *counts), (ours, *our_counts) = runs
    assert counts == our_counts
    assert close(ours, plain, torch.float16 if level == "O0" else half)
    assert ampatch.step_counts(optimizer) == (5, 0, 0)
    for half_weight, master in zip(model.parameters(), values(optimizer), strict=True):
        assert torch.equal(half_weight, master.to(half_weight.dtype))


def everything_of(model, optimizer):
    """Copies of all there is to change, nested state and counters among it."""

    def flat(value):
        if isinstance(value, torch.Tensor):
            return [value.detach().clone()]
        if isinstance(value, dict):
            return [item for entry in value.values() for item in flat(entry)]
        if isinstance(value, (list, collections.deque)):
            return [torch.tensor(len(value)), *(item for entry in value for item in flat(entry))]
        return [torch.tensor(value)] if isinstance(value, (int, float)) else []

    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    own = {"calls": optimizer.calls, "history": optimizer.history}
    found = flat(groups) + flat(dict(optimizer.state)) + flat(own)
    return [*found, *everything(model, optimizer)]


FAULTS = [
    (kind, faulty)
    for kind in OPTIMIZERS
    for faulty in ([0, 1] if kind in (Extragradient, SamWithHalves) else [0])
]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("kind, faulty", FAULTS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_one_skipped_step_and_leaves_no_trace(level, kind, faulty, bad, steps):
    model, optimizer = start(kind, level)
    for _ in range(steps):
        optimizer.step(closure_of(model, optimizer))
    before, seen = everything_of(model, optimizer), []
    places = [param.data_ptr() for param in ampatch.master_params(optimizer)]
    factors = [1.0] * faulty + [bad]
    result = optimizer.step(closure_of(model, optimizer, factors, seen=seen))
    assert result is seen[0] and len(seen) == faulty + 1
    assert same(everything_of(model, optimizer), before)
    assert places == [param.data_ptr() for param in ampatch.master_params(optimizer)]
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == 512.0
    assert ampatch.step_counts(optimizer) == (steps, 1, 1)
    optimizer.step(closure_of(model, optimizer))
    assert not same(everything_of(model, optimizer), before)


@pytest.mark.parametrize("kind, faulty", FAULTS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ctrl_c_leaves_no_trace(level, kind, faulty):
    model, optimizer = start(kind, level)
    optimizer.step(closure_of(model, optimizer))
    before, count = everything_of(model, optimizer), itertools.count()
    inner = closure_of(model, optimizer)

    def closure():
        loss = inner()
        if next(count) == faulty:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert same(everything_of(model, optimizer), before)
    assert ampatch.step_counts(optimizer) == (1, 0, 0)


# Without gradients, without an evaluation


class MeZO(Base):
    """Malladi et al. 2023 (arXiv 2305.17333): two forwards, no backward pass."""

    @torch.no_grad()
    def step(self, closure):
        self.count()
        losses = []
        for shift in (0.05, -0.1):
            self._shift(shift)
            losses.append(closure())
        self._shift(0.05)
        self._shift((losses[1] - losses[0]) / 0.1 * 0.01)
        return losses[0]

    def _shift(self, size):
        generator = torch.Generator().manual_seed(self.calls)
        for param in self.weights():
            noise = torch.randn(param.shape, generator=generator)
            param.data.add_(noise.to(param.dtype) * size)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_forwards_without_gradients_see_the_perturbed_weights(level, half):
    runs = []
    for where in (None, level):
        model, optimizer = start(MeZO, where, half)
        losses, grad_modes = [], set()

        def closure(model=model, losses=losses, grad_modes=grad_modes):
            grad_modes.add(torch.is_grad_enabled())
            loss = F.mse_loss(model(data()[0]).float(), data()[1])
            losses.append(loss)
            return loss

        for _ in range(8):
            optimizer.step(closure)
        assert grad_modes == {False}
        runs.append((torch.stack(losses), values(optimizer)))
    (plain_losses, plain), (losses, ours) = runs
    assert (plain_losses[0::2] - plain_losses[1::2]).abs().min() > 1e-3  # the perturbation shows
    tolerance = 5e-3 if half is torch.float16 else 5e-2
    torch.testing.assert_close(losses, plain_losses, atol=tolerance, rtol=tolerance)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2 * tolerance, rtol=0)
    assert ampatch.step_counts(optimizer) == (8, 0, 0)


class NeverAsks(Base):
    """Takes a closure because its base class does."""

    @torch.no_grad()
    def step(self, closure=None):
        self.count()
        self.descend()


@pytest.mark.parametrize("kind", [NeverAsks, torch.optim.SGD])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_from_before_the_step_count(level, kind):
    """The closure is not called, or only runs a forward: earlier gradients' overflow is seen."""
    model = seeded()
    optimizer = kind(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, init_scale=1024.0, verbosity=0)

    def forward_only():
        with torch.no_grad():
            return F.mse_loss(model(data()[0]).float(), data()[1])

    before = values(optimizer)
    closure_of(model, optimizer, [math.inf])()
    optimizer.step(forward_only)
    assert same(values(optimizer), before) and ampatch.step_counts(optimizer) == (0, 1, 1)
    assert not optimizer.state
    closure_of(model, optimizer)()
    optimizer.step(forward_only)
    plain_model = seeded()
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    F.mse_loss(plain_model(data()[0]), data()[1]).backward()
    plain.step()
    assert close(values(optimizer), [p.detach() for p in plain_model.parameters()])
    assert ampatch.step_counts(optimizer) == (1, 1, 0)


def test_the_order_of_events_is_the_optimizers():
    """torch's own: hooks, closure, update; a zero-first one: zeroed before the closure."""
    events = []
    model, optimizer = start(ZeroFirst, "O1")
    optimizer.register_step_pre_hook(lambda *args: events.append("hook"))
    closure_of(model, optimizer)()

    def closure():
        events.append([param.grad for param in optimizer.weights()] == [None] * 4)
        return closure_of(model, optimizer, zeroes=False)()

    optimizer.step(closure)
    assert events == ["hook", True]


class OfOptions(Base):
    """Takes its closure in a dict of options, and another one beside it."""

    @torch.no_grad()
    def step(self, options, check=None):
        with torch.enable_grad():
            loss = options["closure"]()
        if check is not None:
            check()
        self.descend()
        return loss


@pytest.mark.parametrize("where", ["closure", "check"])
def test_closures_in_other_places(where):
    model, optimizer = start(OfOptions, "O1")
    dtypes = []

    def check():
        dtypes.append(F.linear(torch.ones(1, 4), next(model.parameters())).dtype)

    def closure():
        if where == "closure":
            check()
        return closure_of(model, optimizer)()

    optimizer.step({"closure": closure, "eps": 1.0}, check=check if where == "check" else None)
    assert dtypes == [torch.float16]
    before = everything_of(model, optimizer)
    optimizer.step({"closure": closure_of(model, optimizer, [math.inf])})
    assert same(everything_of(model, optimizer), before)
    assert ampatch.step_counts(optimizer) == (1, 1, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_of_the_class_replaced_later_is_called(level, monkeypatch):
    """`torch.optim.SGD.step` patched after `initialize`, by a function or by a mock."""
    from unittest import mock

    model, optimizer = start(torch.optim.SGD, level)
    before, calls = values(optimizer), []

    def step(self, closure=None):
        calls.append(self)
        for param in ampatch.master_params(self):
            param.data.add_(1.0)
        return "patched"

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        closure_of(model, optimizer)()
        assert optimizer.step() == "patched" and calls == [optimizer]
        for weight, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(weight, (old + 1.0).to(weight.dtype))
        closure_of(model, optimizer, [math.inf])()
        assert optimizer.step() is None and len(calls) == 1
    with mock.patch.object(torch.optim.SGD, "step") as mocked:
        closure_of(model, optimizer)()
        optimizer.step()
    mocked.assert_called_once_with()
    before = values(optimizer)
    closure_of(model, optimizer)()
    optimizer.step()
    assert not same(values(optimizer), before)
    assert ampatch.step_counts(optimizer) == (3, 1, 0)


def test_a_patched_class_may_move_before_it_asks(monkeypatch):
    """What torch's own optimizers promise holds only for their own `step`."""
    model, optimizer = start(torch.optim.SGD, "O1")

    def step(self, closure):
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(1.0)
        return closure()

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    before = values(optimizer)
    optimizer.step(closure_of(model, optimizer, [math.inf]))
    assert same(values(optimizer), before) and ampatch.step_was_skipped(optimizer)


def test_writes_of_the_closure_into_half_weights_count():
    """It clamps the model's weights after the backward pass; the optimizer asks twice."""

    def run(level):
        model, optimizer = start(Extragradient, level)
        inner = closure_of(model, optimizer)

        def closure():
            loss = inner()
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.2, 0.2)
            return loss

        optimizer.step(closure)
        return values(optimizer)

    plain = run(None)
    assert close(run("O2"), plain)


def test_lazily_made_state_and_tensor_settings_go_back():
    model = nn.Linear(2, 1)
    lr = torch.tensor(0.1)

    class Scheduled(Base):
        @torch.no_grad()
        def step(self, closure):
            self.param_groups[0]["lr"].mul_(0.5)
            self.param_groups[0]["betas"] = (0.1, [torch.ones(1)])
            self.made = True
            with torch.enable_grad():
                return closure()

    optimizer = Scheduled(model.parameters(), lr=lr)
    ampatch.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def closure():
        loss = model(torch.ones(3, 2)).sum().float() * math.inf
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    optimizer.step(closure)
    assert lr.item() == pytest.approx(0.1) and optimizer.param_groups[0]["lr"] is lr
    assert "betas" not in optimizer.param_groups[0] and not hasattr(optimizer, "made")


class KeepsWhatCannotBeWritten(Base):
    """Attributes whose memory torch or numpy refuses to write, before one that changes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.scale = torch.ones(1)
        self.spread = self.scale.expand(5)
        with torch.inference_mode():
            self.constant = torch.ones(2)
        self.table = np.broadcast_to(np.ones(1), (5,))
        self.number = np.float64(0.5)
        self.total = torch.zeros(1)

    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            self.count()
            self.descend()
            self.total += 1
            self.scale += 1
        return loss


def test_attributes_that_cannot_be_written_go_back_with_all_others():
    model = seeded()
    optimizer = KeepsWhatCannotBeWritten(model.parameters())
    ampatch.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    before = values(optimizer)
    optimizer.step(closure_of(model, optimizer, (1.0, math.inf)))
    assert ampatch.step_was_skipped(optimizer)
    assert all(map(torch.equal, before, values(optimizer)))
    assert (optimizer.calls, optimizer.total.item(), optimizer.scale.item()) == (0, 0, 1)
    assert optimizer.spread.tolist() == optimizer.table.tolist() == [1.0] * 5
    assert optimizer.number == 0.5 and optimizer.constant.tolist() == [1.0, 1.0]
    assert not optimizer.state and not optimizer.history


class Stubborn(torch.Tensor):
    """Takes no values once it is `sealed`."""

    sealed = False

    def copy_(self, *args):
        if Stubborn.sealed:
            raise RuntimeError("this tensor is sealed")
        return super().copy_(*args)


def test_one_value_that_cannot_go_back_keeps_no_other_from_it(monkeypatch):
    stubborn, other = torch.zeros(2).as_subclass(Stubborn), torch.zeros(2)
    monkeypatch.setattr(Stubborn, "sealed", True)
    snapshot = Snapshot((stubborn, other))
    other += 1
    with pytest.raises(RuntimeError, match="this tensor is sealed"):
        snapshot.restore()
    assert other.tolist() == [0.0, 0.0]


def test_a_step_inside_a_step():
    """A wrapper and what it wraps are both managed; the wrapper's overflow ends both steps."""

    class Around(Base):
        def __init__(self, params):
            super().__init__(params)
            self.inner = torch.optim.LBFGS(self.param_groups[0]["params"], lr=0.1, max_iter=2)

        @torch.no_grad()
        def step(self, closure):
            self.count()
            return self.inner.step(closure) + 0

    model = seeded()
    optimizer = Around(model.parameters())
    ampatch.initialize(model, [optimizer, optimizer.inner], opt_level="O1", verbosity=0)
    before = everything_of(model, optimizer)
    for faulty in (0, 1):
        optimizer.step(closure_of(model, optimizer, [1.0] * faulty + [math.inf]))
        assert same(everything_of(model, optimizer), before)
        assert not optimizer.inner.state
    assert ampatch.step_counts(optimizer) == (0, 2, 2)
    assert optimizer.step(closure_of(model, optimizer)).isfinite()
    assert ampatch.step_counts(optimizer) == (1, 2, 0)
