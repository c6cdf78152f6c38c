"""`optimizer.step(closure)`: ordinary optimizers, LBFGS, the user's own; overflows inside."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from small_training import BAD, backward, close, data, everything, float_grads, grads, same, start
from torch import nn

import ampatch


def closure_of(model, optimizer, factors=None, batch=None, seen=None):
    """A closure whose nth evaluation multiplies the loss by the nth of `factors` (then 1)."""
    factors = iter(factors or [])

    def closure():
        optimizer.zero_grad()
        loss = backward(model, optimizer, batch or data(), next(factors, 1.0))
        if seen is not None:
            seen.append(loss)
        return loss

    return closure


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
LBFGS = {"lr": 1.0, "max_iter": 8, "history_size": 5}
SEARCHES = [None, "strong_wolfe"]


# Ordinary optimizers


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_closure_is_the_loop_in_other_words(opt_level, half, kind):
    optimizer_class, options = OPTIMIZERS[kind]
    results = []
    for with_closure in (True, False):
        model, optimizer = start(opt_level, optimizer_class, half, options=options)
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


@pytest.mark.parametrize("how", ["position", "keyword"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_closure_runs_once_with_casts_and_gradients_on(level, how):
    model, optimizer = start(level)
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


def test_torch_optimizers_evaluate_once():
    """All but LBFGS, which is why no copy of weights and state is made for them."""
    from ampatch.scaling.optimizers.closures import torch_optimizers

    assert torch.optim.LBFGS not in torch_optimizers() and len(torch_optimizers()) >= 12
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


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step_and_gives_back_the_loss(level, kind, bad):
    optimizer_class, options = OPTIMIZERS[kind]
    model, optimizer = start(level, optimizer_class, options=options)
    optimizer.step(closure_of(model, optimizer))
    before, seen = everything(model, optimizer), []
    result = optimizer.step(closure_of(model, optimizer, [bad], seen=seen))
    assert result is seen[0] and len(seen) == 1
    assert same(everything(model, optimizer), before)
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == 512.0
    assert ampatch.step_counts(optimizer) == (1, 1, 1)
    optimizer.step(closure_of(model, optimizer))
    assert not same(everything(model, optimizer), before)


# LBFGS


def least_squares(level=None, dtype=torch.float16, steps=6, search=None, scheduled=True):
    """Losses of a regression with an exact solution, and the weights in FP32."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    inputs = torch.randn(24, 6)
    targets = inputs @ torch.randn(6, 2) + 0.5
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1.0 if search else 0.5, line_search_fn=search
    )
    if level is not None:
        ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs).float(), targets)
        if level is None:
            loss.backward()
        else:
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(steps)]
    losses.append(F.mse_loss(model(inputs).float(), targets).item())
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    ampatch.deactivate()
    return losses, weights


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_lbfgs_converges_near_the_float_run(level, half, search):
    plain, weights = least_squares(search=search)
    assert plain[-1] < 1e-6 * plain[0]
    losses, found = least_squares(level, half, search=search)
    resolution = torch.finfo(torch.float32 if level == "O0" else half).eps
    assert losses[-1] < max(1e-6, 4 * resolution**2) * plain[0] and math.isfinite(losses[-1])
    assert torch.allclose(found, weights, atol=max(1e-3, 4 * resolution))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("faulty", [0, 1, 3])
def test_an_overflow_in_any_evaluation_puts_all_back(level, search, faulty):
    model, optimizer = start(level, torch.optim.LBFGS, options={**LBFGS, "line_search_fn": search})
    optimizer.step(closure_of(model, optimizer))  # so that there is a history
    before, state = everything(model, optimizer), lbfgs_state(optimizer)
    seen = []
    factors = [1.0] * faulty + [math.inf]
    batch = data(5)
    result = optimizer.step(closure_of(model, optimizer, factors, batch, seen))
    assert len(seen) == faulty + 1 and result is seen[0]
    assert same(everything(model, optimizer), before)
    assert_equal(lbfgs_state(optimizer), state)
    assert ampatch.step_was_skipped(optimizer) and ampatch.step_counts(optimizer) == (1, 1, 1)
    assert ampatch.loss_scale() == 512.0
    if level == "O2":
        halves = list(model.parameters())
        masters = list(ampatch.master_params(optimizer))
        assert all(torch.equal(h, m.to(h.dtype)) for h, m in zip(halves, masters, strict=True))
    last = [optimizer.step(closure_of(model, optimizer, batch=batch)) for _ in range(3)][-1]
    assert last < seen[0] and all(t.isfinite().all() for t in everything(model, optimizer))


def lbfgs_state(optimizer):
    """A copy of the whole state, lists and numbers too."""
    (state,) = optimizer.state.values()
    return {
        key: value.clone()
        if isinstance(value, torch.Tensor)
        else [item.clone() if isinstance(item, torch.Tensor) else item for item in value]
        if isinstance(value, list)
        else value
        for key, value in state.items()
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and "old_dirs" in found
    for key, value in expected.items():
        if isinstance(value, list):
            assert len(found[key]) == len(value), key
            pairs = zip(found[key], value, strict=True)
        else:
            pairs = [(found[key], value)]
        for one, other in pairs:
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, key


# Exceptions inside


class Stop(BaseException):
    """As KeyboardInterrupt: no `Exception`."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("faulty", [0, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_a_closure_puts_all_back(level, faulty, error):
    model, optimizer = start(level, torch.optim.LBFGS, options=LBFGS)
    optimizer.step(closure_of(model, optimizer))
    before, state = everything(model, optimizer), lbfgs_state(optimizer)
    count = itertools.count()

    def closure():
        loss = closure_of(model, optimizer, batch=data(5))()
        if next(count) == faulty:
            raise error
        return loss

    with pytest.raises(error):
        optimizer.step(closure)
    assert same(everything(model, optimizer), before)
    assert_equal(lbfgs_state(optimizer), state)
    assert ampatch.step_counts(optimizer) == (1, 0, 0)
    weight = next(model.parameters()) if level == "O1" else torch.ones(2, 4)
    out = F.linear(torch.ones(1, 4), weight)
    assert out.dtype is (torch.float16 if level == "O1" else torch.float32)
    optimizer.step(closure_of(model, optimizer))
    assert ampatch.step_counts(optimizer) == (2, 0, 0)


# Optimizers of the user's own


class TwoSteps(torch.optim.Optimizer):
    """SAM-like: climbs by the first gradient, descends from where it was by the second."""

    def __init__(self, params, lr=0.1, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        climbs = [param.grad * self.defaults["rho"] for param in params]
        for param, climb in zip(params, climbs, strict=True):
            param.add_(climb)
        closure()
        for param, climb in zip(params, climbs, strict=True):
            param.sub_(climb).sub_(param.grad, alpha=self.defaults["lr"])
            self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
        return loss


def test_two_evaluations_as_in_float(half):
    model, optimizer = start("O0", TwoSteps)
    for _ in range(5):
        expected = optimizer.step(closure_of(model, optimizer)).item()
    for level in ("O1", "O2"):
        model, optimizer = start(level, TwoSteps, half)
        for _ in range(5):
            found = optimizer.step(closure_of(model, optimizer)).item()
        assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("faulty", [0, 1])
def test_two_evaluations_of_which_one_overflows(level, faulty):
    model, optimizer = start(level, TwoSteps)
    optimizer.step(closure_of(model, optimizer))
    before = everything(model, optimizer)
    optimizer.step(closure_of(model, optimizer, [1.0] * faulty + [math.nan]))
    assert ampatch.step_was_skipped(optimizer) and same(everything(model, optimizer), before)
    assert [state["steps"] for state in optimizer.state.values()] == [1] * 4


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_may_do_without_scale_loss(level):
    model, optimizer = start(level, dtype=torch.bfloat16)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(data()[0]).float(), data()[1])
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert not ampatch.step_was_skipped(optimizer)


def test_a_closure_that_delays_the_unscaling():
    model, optimizer = start("O2", options={"lr": 1.0})
    before = [p.detach().clone() for p in ampatch.master_params(optimizer)]

    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, data(), delay_unscale=True)

    optimizer.step(closure)
    moved = [a - b.detach() for a, b in zip(before, ampatch.master_params(optimizer), strict=True)]
    assert close(moved, float_grads(data()))
