"""Casting switched by hand: `ampatch.init` and its handle, `disable_casts`, `precision`."""

import pytest
import torch
from engine import STATE
from torch import nn

import ampatch

HALF, SINGLE = torch.float16, torch.float32


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def optimizer(weight):
    return torch.optim.SGD([weight], lr=0.5)


def test_casting_lasts_from_init_to_deactivate_and_again(caplog):
    for end in ("_deactivate", "deactivate"):  # apex's, and ours
        handle = ampatch.init()
        assert handle.is_active() and product() is HALF
        assert STATE.process_policy.devices is None
        assert ampatch.init() is handle and not caplog.records
        assert ampatch.init(loss_scale=8.0) is handle and "loss_scale=8.0" in caplog.text
        caplog.clear()
        getattr(handle if end == "_deactivate" else ampatch, end)()
        assert not handle.is_active() and product() is SINGLE


def test_disabled(weight, optimizer):
    handle = ampatch.init(enabled=False)
    assert not handle.is_active() and product() is SINGLE
    wrapped = handle.wrap_optimizer(optimizer)
    for scaling in (handle.scale_loss(weight.sum(), optimizer), wrapped.scale_loss(weight.sum())):
        with scaling as loss:
            assert loss.item() == 2.0
    wrapped.step()
    assert "step" not in vars(optimizer)


def test_losses_are_scaled_gradients_are_not_and_an_overflow_skips_the_step(weight, optimizer):
    handle = ampatch.init()
    for factor, end in ((float("inf"), 1.0), (1.0, 0.5)):
        optimizer.zero_grad()
        with handle.scale_loss((weight * factor).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert torch.equal(weight, torch.full((2,), end)) and ampatch.loss_scale() == 2.0**15


def test_an_optimizer_is_managed_once_and_by_one(weight, optimizer):
    handle = ampatch.init()
    for _ in range(2):
        with handle.scale_loss(weight.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ampatch.step_counts(optimizer).taken == 2
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    ampatch.initialize([], other, verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match="use ampatch.scale_loss for it"):
        handle.scale_loss(weight.sum(), other)


def test_a_wrapped_optimizer_has_a_scale_for_each_loss(weight, optimizer):
    handle = ampatch.init()
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    assert wrapped.param_groups[0]["lr"] == 0.5 and "state" in wrapped.state_dict()
    wrapped.zero_grad()
    for factor in (1.0, float("inf")):
        with wrapped.scale_loss((weight * factor).sum()) as scaled:
            scaled.backward()
    wrapped.step()
    assert torch.equal(weight, torch.ones(2))
    assert [ampatch.loss_scale(index) for index in (1, 2)] == [2.0**16, 2.0**15]
    wrapped.zero_grad()
    with wrapped.scale_loss(weight.sum()) as scaled:
        assert float(scaled.detach()) == 2 * 2.0**16  # the first loss's again
        scaled.backward()
    wrapped.step()
    assert torch.equal(weight, torch.full((2,), 0.5))
    with wrapped.scale_loss(weight.sum()) as scaled:
        assert float(scaled.detach()) == 2.0**16  # a step begins the turns anew
    ampatch.deactivate()
    assert "step" not in vars(optimizer)


def test_a_handle_outlives_its_optimizers():
    handle = ampatch.init()
    handle.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    ampatch.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert handle.is_active() and ampatch.init() is handle


def test_unsafe_functions_are_refused_on_half():
    half = torch.full((2,), 0.5, dtype=HALF)
    ampatch.init()
    for call in (lambda: nn.functional.binary_cross_entropy(half, half), half.exp_):
        with pytest.raises(NotImplementedError):
            call()
    ampatch.deactivate()
    ampatch.init(allow_banned=True)
    assert nn.functional.binary_cross_entropy(half, half).dtype is SINGLE


def test_the_cache(weight):
    handle = ampatch.init(enable_caching=True)
    handle.remove_cache(weight)
    assert handle.has_cache
    ampatch.deactivate()
    assert not ampatch.init(enable_caching=False).has_cache


def test_wrong_arguments_are_named(optimizer):
    handle = ampatch.init()
    for error, says, *arguments in (
        (AttributeError, "'Linear' object has no attribute 'param_groups'", nn.Linear(1, 1)),
        (ValueError, "num_loss", optimizer, 0),
        (TypeError, "num_loss='2'.: expected a whole number, got str", optimizer, "2"),
    ):
        with pytest.raises(error, match=says):
            handle.wrap_optimizer(*arguments)
    ampatch.deactivate()
    with pytest.raises(ValueError, match="loss_scale"):
        ampatch.init(loss_scale=-1)


# Blocks: `disable_casts`, `precision`

X = torch.randn(4, 4)
H = torch.bfloat16


@pytest.fixture
def o1():
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0)


def now() -> tuple:
    return torch.mm(X, X).dtype, torch.exp(X.to(H)).dtype


CASTING = (H, torch.float32)
PLAIN = (torch.float32, H)


def test_blocks_nest_and_restore_what_they_found(o1):
    assert now() == CASTING
    with ampatch.disable_casts():
        assert now() == PLAIN
        with ampatch.disable_casts():
            assert now() == PLAIN
        assert now() == PLAIN  # not switched on by the inner one
    assert now() == CASTING
    with ampatch.precision("float"):
        assert now() == (torch.float32, torch.float32)
        with ampatch.precision("half"):
            pass
        with ampatch.disable_casts():
            assert now() == PLAIN
        assert now() == (torch.float32, torch.float32)
    with ampatch.precision("half"):
        assert now() == (H, H)
    assert now() == CASTING


def test_blocks_are_decorators_and_reenter(o1):
    @ampatch.disable_casts()
    def plain(depth: int) -> list:
        """Its docstring."""
        return [now()] + (plain(depth - 1) if depth else [])

    assert plain(2) == [PLAIN] * 3 and now() == CASTING
    assert plain.__name__ == "plain" and plain.__doc__ == "Its docstring."
