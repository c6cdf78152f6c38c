"""`optimizer.step(closure)`: the optimizer calls the closure late, often, or never.

Trainings at every level against a loop by hand are in `tests/laws/situations_optimizers.py`.  Here:
torch's own evaluate it first and skip as without a closure; LBFGS and the user's own take it under
a static scale, and are refused under a dynamic one before anything happens.
"""

from __future__ import annotations

import collections
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from small_training import backward, close, data, everything, float_grads, grads, same, seeded
from small_training import start as started
from torch import nn

import ampatch


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
    """Goes on where an evaluation raised, whatever that was."""

    @torch.no_grad()
    def step(self, closure):
        self.count()
        try:
            with torch.enable_grad():
                loss = closure()
        except KeyboardInterrupt:
            raise
        except BaseException:
            loss = None
        self.descend()
        return loss


TORCHS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
LBFGS = {"lr": 1.0, "max_iter": 8, "history_size": 5}
SEARCHES = [None, "strong_wolfe"]
OWN = [ZeroFirst, ZeroFirstByHand, Extragradient, MoveFirst, SwapsData, SamWithHalves, Forgiving]
KINDS = {
    **TORCHS,
    "LBFGS": (torch.optim.LBFGS, LBFGS),
    "LBFGS, search": (torch.optim.LBFGS, {**LBFGS, "line_search_fn": "strong_wolfe"}),
    **{kind.__name__: (kind, {"lr": 0.1}) for kind in OWN},
}
FOREIGN = [kind for kind in KINDS if kind not in TORCHS]
STATIC = {"loss_scale": 128.0}


def start(kind, level="O2", half=torch.float16, **settings):
    """A model and an optimizer of a kind, or of a class; `level` None is without ampatch."""
    make, options = KINDS[kind] if isinstance(kind, str) else (kind, {"lr": 0.1})
    if level is not None:
        return started(level, make, half, options=options, **settings)
    model = seeded()
    return model, make(model.parameters(), **options)


def closure_of(model, optimizer, factors=(), zeroes=True, seen=None, batch=None):
    """A closure whose nth evaluation multiplies the loss by the nth of `factors` (then 1)."""
    factors, batch = iter(factors), batch or data()

    def closure():
        if zeroes:
            optimizer.zero_grad()
        factor = next(factors, 1.0)
        if ampatch.session.session.registry.sessions:
            loss = backward(model, optimizer, batch, factor)
        else:
            loss = F.mse_loss(model(batch[0]), batch[1]) * factor
            loss.backward()
        if seen is not None:
            seen.append(loss)
        return loss

    return closure


def values(optimizer):
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


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
    own = {name: vars(optimizer).get(name) for name in ("calls", "history")}
    found = flat(groups) + flat(dict(optimizer.state)) + flat(own)
    return [*found, *everything(model, optimizer)]


# As without ampatch


@pytest.mark.parametrize("kind", OWN)
def test_trains_as_in_float(kind):
    zeroes = not kind.__name__.startswith("ZeroFirst")
    runs = []
    for where in (None, "O2"):
        model, optimizer = start(kind, where, **STATIC)
        seen = []
        for _ in range(5):
            optimizer.step(closure_of(model, optimizer, zeroes=zeroes, seen=seen))
        runs.append((values(optimizer), len(seen), optimizer.calls))
    (plain, *counts), (ours, *our_counts) = runs
    assert counts == our_counts
    assert close(ours, plain)
    assert ampatch.step_counts(optimizer) == (5, 0, 0)


@pytest.mark.parametrize(
    ("kind", "level"),
    [*((kind, "O2") for kind in TORCHS), ("SGD", "O0"), ("SGD", "O1"), ("SGD", "O3")],
)
def test_a_closure_is_the_loop_in_other_words(kind, level):
    results = []
    for with_closure in (True, False):
        model, optimizer = start(kind, level)
        losses = []
        for _ in range(4):
            closure = closure_of(model, optimizer)
            if with_closure:
                losses.append(optimizer.step(closure))
            else:
                losses.append(closure())
                optimizer.step()
        results.append([torch.stack(losses).detach(), *everything(model, optimizer)])
        assert ampatch.step_counts(optimizer) == (4, 0, 0)
    assert same(*results)


def least_squares(level=None, dtype=torch.float16, search=None):
    """Losses of a regression with an exact solution, and the weights in FP32."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    inputs = torch.randn(24, 6)
    batch = inputs, inputs @ torch.randn(6, 2) + 0.5
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1.0 if search else 0.5, line_search_fn=search
    )
    if level is not None:
        settings = {"dtype": dtype, "loss_scale": 128.0, "verbosity": 0}
        ampatch.initialize(model, optimizer, opt_level=level, **settings)
    closure = closure_of(model, optimizer, batch=batch)
    losses = [optimizer.step(closure).item() for _ in range(6)]
    losses.append(F.mse_loss(model(inputs).float(), batch[1]).item())
    ampatch.deactivate()
    return losses, torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lbfgs_converges_near_the_float_run(level, half, search):
    plain, weights = least_squares(search=search)
    assert plain[-1] < 1e-6 * plain[0]
    losses, found = least_squares(level, half, search)
    resolution = torch.finfo(half).eps
    assert losses[-1] < max(1e-6, 4 * resolution**2) * plain[0] and math.isfinite(losses[-1])
    assert torch.allclose(found, weights, atol=max(1e-3, 4 * resolution))


@pytest.mark.parametrize("how", ["position", "keyword"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_closure_runs_once_with_casts_and_gradients_on(level, how):
    model, optimizer = start("SGD", level)
    seen = []

    def closure():
        weight = next(model.parameters()) if level == "O1" else torch.ones(2, 4)
        seen.append((F.linear(torch.ones(1, 4), weight).dtype, torch.is_grad_enabled()))
        return closure_of(model, optimizer)()

    with torch.no_grad():
        optimizer.step(closure) if how == "position" else optimizer.step(closure=closure)
    assert seen == [(torch.float16 if level == "O1" else torch.float32, True)]
    assert close(grads(optimizer), float_grads(data()))


class Shifted(nn.Module):
    """Its forward multiplies its inputs and an FP32 buffer: a half model that mixes dtypes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("shift", torch.eye(4))

    def forward(self, x):
        return torch.mm(self.first(x), self.shift)


def test_a_closure_is_in_the_users_block_around_the_step_also_where_little_is_cast(half):
    """A model that mixes dtypes is cast inside only, and `disable_casts()` ends that too."""
    model = Shifted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ampatch.initialize(model, optimizer, opt_level="O2", dtype=half)
    x = torch.ones(2, 4)

    def closure():
        with ampatch.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()

    optimizer.step(closure)
    with ampatch.disable_casts():
        with pytest.raises(RuntimeError, match="dtype"):
            model(x)
        with pytest.raises(RuntimeError, match="dtype"):
            optimizer.step(closure)
    optimizer.step(closure)


def torch_optimizers():
    """All but LBFGS."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)]
    return [kind for kind in kinds if kind not in (torch.optim.Optimizer, torch.optim.LBFGS)]


def test_torch_optimizers_evaluate_once():
    """All but LBFGS, with the weights from before: so the closure and then `step()` do the same."""
    assert len(torch_optimizers()) >= 12
    for kind in torch_optimizers():
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = kind([weight], lr=0.1)
        at = []

        def closure(weight=weight, kind=kind, at=at):
            at.append(weight.detach().clone())
            weight.grad = torch.ones(2, 2)
            weight.grad = weight.grad.to_sparse() if kind is torch.optim.SparseAdam else weight.grad
            return weight.sum()

        optimizer.step(closure)
        assert len(at) == 1 and torch.equal(at[0], torch.ones(2, 2)), kind
        ampatch.initialize([], optimizer, opt_level="O1", dtype=torch.float16, verbosity=0)
        optimizer.step(closure)
        ampatch.deactivate()
        assert len(at) == 2, kind


def test_a_closure_may_do_without_scale_loss():
    model, optimizer = start("SGD", half=torch.bfloat16)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(data()[0]).float(), data()[1])
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert not ampatch.step_was_skipped(optimizer)


def test_a_closure_that_delays_the_unscaling():
    model, optimizer = started("O2", options={"lr": 1.0})
    before = values(optimizer)

    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, data(), delay_unscale=True)

    optimizer.step(closure)
    assert close(list(map(torch.sub, before, values(optimizer))), float_grads(data()))


# Overflows and exceptions


@pytest.mark.parametrize(("level", "bad", "steps"), [("O1", math.nan, 0), ("O2", math.inf, 2)])
@pytest.mark.parametrize("kind", TORCHS)
def test_an_overflow_is_one_skipped_step_and_leaves_no_trace(kind, level, bad, steps):
    """With and without a state before; the result is the loss."""
    model, optimizer = start(kind, level)
    for _ in range(steps):
        optimizer.step(closure_of(model, optimizer))
    before, seen = everything_of(model, optimizer), []
    result = optimizer.step(closure_of(model, optimizer, [bad], seen=seen, batch=data(5)))
    assert result is seen[0] and len(seen) == 1
    assert same(everything_of(model, optimizer), before)
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == 512.0
    assert ampatch.step_counts(optimizer) == (steps, 1, 1)
    optimizer.step(closure_of(model, optimizer, batch=data(5)))
    assert all(value.isfinite().all() for value in values(optimizer))
    assert not same(everything_of(model, optimizer), before)


class Mine(torch.optim.SGD):
    """A `step` of the user's around torch's own."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [*FOREIGN, Mine])
def test_others_are_refused_under_a_dynamic_scale(kind):
    """Before the closure runs; gradients, weights and state stay, and so does the training."""
    model, optimizer = start(kind)
    closure_of(model, optimizer)()
    before, found = everything_of(model, optimizer), grads(optimizer)
    with pytest.raises(ampatch.AmpatchError) as refusal:
        optimizer.step(lambda: 1 / 0)
    name = KINDS[kind][0].__name__ if isinstance(kind, str) else kind.__name__
    message = str(refusal.value)
    assert message.startswith(f"{name}.step(closure) under a dynamic loss scale: ")
    for part in ("Nothing was changed.", "dtype=torch.bfloat16", "loss_scale=128.0"):
        assert part in message
    assert same(everything_of(model, optimizer), before)
    assert all(one is two for one, two in zip(found, grads(optimizer), strict=True))
    assert ampatch.step_counts(optimizer) == (0, 0, 0) and ampatch.loss_scale() == 1024.0
    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0, **STATIC)
    optimizer.zero_grad()
    optimizer.step(closure_of(model, optimizer, zeroes=not isinstance(optimizer, ZeroFirst)))
    assert ampatch.step_counts(optimizer) == (1, 0, 0)


@pytest.mark.parametrize("keyword", ["position", "keyword", "options"])
def test_a_closure_is_refused_wherever_it_stands(keyword):
    _, optimizer = start(OfOptions)
    given = {"position": lambda: optimizer.step(print)}
    given |= {"keyword": lambda: optimizer.step({}, check=lambda: None)}
    given |= {"options": lambda: optimizer.step({"closure": lambda: None})}
    with pytest.raises(ampatch.AmpatchError, match="dynamic loss scale"):
        given[keyword]()


class Stop(BaseException):
    """As KeyboardInterrupt: no `Exception`."""


@pytest.mark.parametrize("kind", [*TORCHS, "LBFGS"])
@pytest.mark.parametrize(("error", "level"), [(KeyboardInterrupt, "O2"), (Stop, "O1")])
def test_an_exception_in_a_closure_makes_no_step(kind, error, level):
    model, optimizer = start(kind, level, **({} if kind in TORCHS else STATIC))
    optimizer.step(closure_of(model, optimizer))
    before = everything_of(model, optimizer)
    inner = closure_of(model, optimizer, batch=data(5))

    def closure():
        inner()
        raise error

    with pytest.raises(error):
        optimizer.step(closure)
    if kind in TORCHS:
        assert same(everything_of(model, optimizer), before)
    assert ampatch.step_counts(optimizer) == (1, 0, 0)
    weight = next(model.parameters()) if level == "O1" else torch.ones(2, 4)
    out = F.linear(torch.ones(1, 4), weight)  # casts are on again, or off
    assert out.dtype is (torch.float16 if level == "O1" else torch.float32)
    optimizer.step(closure_of(model, optimizer))
    assert ampatch.step_counts(optimizer) == (2, 0, 0)


def test_gradients_from_before_the_step_count():
    """The closure only runs a forward: earlier gradients' overflow is seen."""
    model, optimizer = start(torch.optim.SGD)

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
    descent = [old - 0.1 * grad for old, grad in zip(before, float_grads(data()), strict=True)]
    assert close(values(optimizer), descent)
    assert ampatch.step_counts(optimizer) == (1, 1, 0)


def test_the_order_of_events_is_the_optimizers():
    """Hooks, zeroes, closure."""
    events = []
    model, optimizer = start(ZeroFirst, "O1", **STATIC)
    optimizer.register_step_pre_hook(lambda *args: events.append("hook"))
    closure_of(model, optimizer)()

    def closure():
        events.append([param.grad for param in optimizer.weights()] == [None] * 4)
        return closure_of(model, optimizer, zeroes=False)()

    optimizer.step(closure)
    assert events == ["hook", True]


class WithoutGradients(Base):
    """Compares losses at perturbed weights, as zeroth-order ones do."""

    @torch.no_grad()
    def step(self, closure):
        return closure()


def test_whether_gradients_are_recorded_is_for_the_optimizer_to_say():
    model, optimizer = start(WithoutGradients, **STATIC)
    optimizer.step(lambda: model(data()[0]).sum() if not torch.is_grad_enabled() else 1 / 0)
    assert ampatch.step_counts(optimizer) == (1, 0, 0)


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
    model, optimizer = start(OfOptions, "O1", **STATIC)
    dtypes = []

    def check():
        dtypes.append(F.linear(torch.ones(1, 4), next(model.parameters())).dtype)

    def closure():
        if where == "closure":
            check()
        return closure_of(model, optimizer)()

    optimizer.step({"closure": closure, "eps": 1.0}, check=check if where == "check" else None)
    assert dtypes == [torch.float16]
    assert ampatch.step_counts(optimizer) == (1, 0, 0)


def test_a_step_inside_a_step():
    """A wrapper and what it wraps are both managed."""

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
    settings = {"opt_level": "O1", "verbosity": 0, **STATIC}
    ampatch.initialize(model, [optimizer, optimizer.inner], **settings)
    losses = [optimizer.step(closure_of(model, optimizer)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert ampatch.step_counts(optimizer) == ampatch.step_counts(optimizer.inner) == (3, 0, 0)


# A class whose step is replaced


def test_a_step_of_the_class_replaced_later_is_called(monkeypatch):
    """`torch.optim.SGD.step` patched after `initialize`, by a function or by a mock."""
    model, optimizer = start("SGD")
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
        assert same(values(optimizer), [old + 1.0 for old in before])
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
    model, optimizer = start("SGD", "O1")
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure: closure())
    with pytest.raises(ampatch.AmpatchError, match="dynamic loss scale"):
        optimizer.step(closure_of(model, optimizer))
