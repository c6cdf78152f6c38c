"""The loss scale: its rule, its limits, where it lives, and what it costs."""

from __future__ import annotations

import importlib
import itertools
import math
import random

import pytest
import torch
from torch import nn

import ampatch
from ampatch.config.scale_settings import ScaleSettings
from ampatch.scaling import scale_value
from ampatch.scaling.loss_scaler import DynamicScaler, StaticScaler
from ampatch.scaling.scale_value import Numbers, moved
from ampatch.torch_private import amp_kernels

pytestmark = pytest.mark.usefixtures("scale_lives_on")


def rule(scale, clean, bad, *, interval, growth, backoff, floor, cap):
    """The dynamic rule, as the paper and torch.amp state it."""
    if bad:
        scale, clean = scale * backoff, 0
    elif clean + 1 == interval:
        scale, clean = scale * growth, 0
    else:
        clean += 1
    return min(max(scale, floor), cap), clean


def flags(*bad):
    return [torch.tensor(float(one)) for one in bad]


@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_rule(seed):
    chance = random.Random(seed)
    interval, growth, backoff = chance.choice([(3, 2.0, 0.5), (5, 4.0, 0.25), (1, 1.5, 0.5)])
    floor, cap = 2.0**-3, 2.0**12
    scaler = DynamicScaler(
        init_scale=64.0,
        growth_interval=interval,
        growth_factor=growth,
        backoff_factor=backoff,
        min_loss_scale=floor,
        max_loss_scale=cap,
    )
    expected, seen = (64.0, 0), set()
    for step in range(300):
        bad = chance.random() < (0.7 if step // 50 % 2 else 0.05)
        scaler.update(flags(bad))
        expected = rule(
            *expected,
            bad,
            interval=interval,
            growth=growth,
            backoff=backoff,
            floor=floor,
            cap=cap,
        )
        assert scaler.state_dict() == {"loss_scale": expected[0], "unskipped": expected[1]}
        seen.add(expected[0])
    assert {floor, cap} <= seen  # both limits were met


def test_it_is_the_rule_of_torchs_gradscaler():
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    ours = DynamicScaler(init_scale=1024.0, growth_interval=4)
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(40):
        bad = step % 11 == 7
        theirs.scale(weight.sum() * (math.inf if bad else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(flags(bad))
        assert ours.get() == theirs.get_scale()


def test_defaults_start_at_two_to_the_sixteen_below_the_cap():
    assert DynamicScaler().get() == 65536.0
    assert DynamicScaler(max_loss_scale=128.0).get() == 128.0
    assert DynamicScaler(min_loss_scale=2.0**20).get() == 2.0**20


def test_one_bad_flag_among_several_is_one_backoff_and_no_flag_is_no_step():
    scaler = DynamicScaler(init_scale=64.0)
    scaler.update(flags(0, 1, 1))
    assert scaler.get() == 32.0
    scaler.update([])
    assert scaler.state_dict() == {"loss_scale": 32.0, "unskipped": 0}
    scaler.update(flags(0, 0))
    assert scaler.state_dict() == {"loss_scale": 32.0, "unskipped": 1}


# Static scales


@pytest.mark.parametrize("value", [128.0, "128.0", 128, "128"])
def test_static_scales_multiply_and_stay(value):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ampatch.initialize(model, optimizer, opt_level="O0", loss_scale=value, verbosity=0)
    x = torch.tensor([[1.0, 2.0]])
    for factor in (1.0, math.inf, 1.0):
        loss = model(x).sum() * factor
        optimizer.zero_grad()
        with ampatch.scale_loss(loss, optimizer) as scaled:
            assert torch.equal(scaled, loss * 128)
            scaled.backward()
        if factor == 1.0:
            assert torch.equal(model.weight.grad, x)
        assert ampatch.loss_scale() == 128.0
    assert ampatch.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


def test_a_half_loss_is_scaled_in_float32():
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert StaticScaler(2.0**16).scale(loss)[0].item() == 3 * 2.0**16  # inf in float16
    assert DynamicScaler().scale(loss)[0].item() == 3 * 2.0**16
    assert StaticScaler().scale(loss)[0].dtype is torch.float32


@pytest.mark.parametrize("make", [StaticScaler, lambda scale: DynamicScaler(init_scale=scale)])
def test_half_gradients_meet_the_scale_itself(make):
    """2**16 is inf in float16, and one part in 2**26 is 0; so no kernel may round it."""
    for dtype, scale in [(torch.float16, 2.0**16), (torch.bfloat16, 1000.0)]:
        grads = [torch.tensor([0.5, 0.0], dtype=dtype), torch.tensor([0.25, 3e-5], dtype=dtype)]
        expected = [(grad.float() * scale).to(dtype) for grad in grads]
        scaler = make(scale)
        scaler.scale_grads_(grads, scaler.snapshot())
        assert all(map(torch.equal, grads, expected))
    large = [torch.tensor([2.0**15], dtype=torch.float16)]
    scaler = make(2.0**16)
    scaler.unscale_(large, scaler.snapshot() * 2.0**10)
    assert large[0].item() == 2.0**-11


@pytest.mark.parametrize("loss_scale", [2.0**16, "dynamic"])
def test_half_gradients_that_wait_are_scaled_up_again(loss_scale):
    """`delay_unscale` after a block, at O3: what the block has left is no overflow."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ampatch.initialize(
        model, optimizer, opt_level="O3", dtype=torch.float16, loss_scale=loss_scale, verbosity=0
    )
    for delays in (False, True):
        loss = model(torch.tensor([[0.5, 0.0]])).float().sum() / 4
        with ampatch.scale_loss(loss, optimizer, delay_unscale=delays) as scaled:
            scaled.backward()
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == 2.0**16
    assert model.weight.grad.tolist() == [[0.25, 0.0]]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_no_scale_that_is_not_positive_and_finite(value):
    with pytest.raises(ValueError, match="positive finite"):
        DynamicScaler().set(value)


# State


def test_the_state_is_tensors_of_fixed_identity():
    """Where a CUDA graph may find it again."""
    scaler = DynamicScaler()
    scale = scaler.peek()
    scaler.update(flags(1))
    scaler.set(8.0)
    scaler.load_state_dict({"loss_scale": 4.0, "unskipped": 3})
    assert scaler.peek() is scale
    scaler.scale(torch.ones((), device="meta"))
    assert scaler.peek().device.type == "meta"


def test_numbers_on_a_device_change_in_place():
    numbers = Numbers(torch.device("cpu"), 8.0)
    scale, clean = numbers.scale, numbers.clean
    numbers.update(torch.zeros(()), ScaleSettings())
    assert numbers.read() == (8.0, 1)
    numbers.fill(4.0, 3)
    assert numbers.scale is scale and numbers.clean is clean
    assert (scale.item(), clean.item()) == (4.0, 3)


def single(number):
    return torch.tensor(number, dtype=torch.float32).item()


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_rule_is_that_of_the_paper_to_the_bit(seed, has_kernel, without_kernels, monkeypatch):
    """In numbers of Python; also in a torch without the kernel for the rule."""
    if not has_kernel:
        monkeypatch.setattr(scale_value, "update_scale_", without_kernels.update_scale_)
    chance = random.Random(seed)
    rule = ScaleSettings(
        growth_interval=chance.choice([1, 2, 3]),
        growth_factor=chance.choice([1.0000001, 1.1, 2.0, 1e30, 3.7e37]),
        backoff_factor=chance.choice([0.9999999, 0.3, 0.5, 1e-30]),
        min_loss_scale=chance.choice([0.1, 2.0**-126]),
        max_loss_scale=chance.choice([1e9 / 3, 2.0**126]),
    )
    numbers = Numbers(torch.device("cpu"), 1e3 / 7)
    scale, clean = single(1e3 / 7), 0
    for _ in range(200):
        values = torch.randn(5) * 10.0 ** chance.randint(-30, 30)
        if chance.random() < 0.3:
            values[2] = chance.choice([math.inf, -math.inf, math.nan])
        grads = [values.clone(), values[:2].clone()]
        found = numbers.unscale_(grads, numbers.snapshot())
        assert bool(found) == (not values.isfinite().all())
        for one in (grads[0], torch.cat([grads[1], values[2:] * single(1 / scale)])):
            expected = values * single(1 / scale)
            torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)
        numbers.update(found, rule)
        scale, clean = moved(scale, clean, bool(found), rule)
        scale = min(max(single(scale), single(rule.min_loss_scale)), single(rule.max_loss_scale))
        assert numbers.read() == (scale, clean)


def test_state_dict_is_apexs_and_comes_back():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apexs = {
        "loss_scaler0": {"loss_scale": 512.0, "unskipped": 17},
        "loss_scaler1": {"loss_scale": 4096.0, "unskipped": 1},
    }
    ampatch.initialize(model, optimizer, num_losses=2, growth_interval=18, verbosity=0)
    ampatch.load_state_dict(apexs)
    assert ampatch.state_dict() == apexs
    assert [ampatch.loss_scale(0), ampatch.loss_scale(1)] == [512.0, 4096.0]
    with ampatch.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()  # the eighteenth clean step
    assert ampatch.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 0}


def test_a_snapshot_outlives_later_changes():
    scaler = DynamicScaler(init_scale=8.0)
    (_, scale), grads = scaler.scale(torch.ones(())), [torch.tensor([16.0])]
    scaler.set(1024.0)
    assert not scaler.unscale_(grads, scale) and grads[0].item() == 2.0


# A torch without the private kernels


@pytest.fixture
def without_kernels(monkeypatch):
    """`scaling.kernels` as a torch without them makes it."""
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
        patch.delattr(torch, "_amp_update_scale_")
        spec = importlib.util.spec_from_file_location(
            "ampatch.torch_private._none", amp_kernels.__file__
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    assert module.update_scale_ is None is not amp_kernels.update_scale_
    return module


def test_fallbacks_do_what_the_kernels_do(without_kernels, monkeypatch):
    limits = {
        "init_scale": 32.0,
        "growth_interval": 2,
        "min_loss_scale": 4.0,
        "max_loss_scale": 256.0,
    }
    scalers = DynamicScaler(**limits), DynamicScaler(**limits)
    values = [1.0, 1.0, math.inf, 3.0, -math.inf, 1.0, math.nan, *([1.0] * 14)]
    for first, second in itertools.pairwise(values):
        results = []
        for scaler, module in zip(scalers, (amp_kernels, without_kernels), strict=True):
            monkeypatch.setattr(scale_value, "update_scale_", module.update_scale_)
            monkeypatch.setattr(scale_value, "check_and_unscale_", module.check_and_unscale_)
            grads = [torch.tensor([first, 7.0]), torch.tensor([second])]
            found = scaler.unscale_(grads, scaler.scale(torch.ones(()))[1])
            scaler.update([found])
            results.append((bool(found), scaler.state_dict(), grads))
        assert results[0][:2] == results[1][:2]
        assert all(a.equal(b) or not a.isfinite().all() for a, b in zip(*(r[2] for r in results)))
    assert scalers[0].get() == 256.0


def test_another_default_device_does_not_draw_the_scale_away():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, dtype=torch.bfloat16, loss_scale="dynamic", verbosity=0)
    loss = model(torch.ones(2, 4)).float().square().mean()
    with torch.device("meta"):
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert model.weight.isfinite().all() and model.weight.grad.device.type == "cpu"
