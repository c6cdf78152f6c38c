"""The loss scale: its rule, its limits, where it lives, and what it costs."""

import importlib
import math
import random

import pytest
import torch
from small_training import step
from torch import nn

import ampatch
from ampatch.scaling import scale_value, unscaling
from ampatch.scaling.loss_scaler import DynamicScaler, StaticScaler
from ampatch.torch_private import amp_kernels

pytestmark = pytest.mark.usefixtures("scale_lives_on")


def single(number):
    return torch.tensor(number, dtype=torch.float32).item()


def ruled(scale, clean, bad, settings):
    """The dynamic rule as the paper and torch.amp state it, in FP32, which the scale stays in."""
    if bad:
        scale, clean = scale * settings["backoff_factor"], 0
    elif clean + 1 == settings["growth_interval"]:
        grown, clean = scale * settings["growth_factor"], 0
        scale = grown if grown <= torch.finfo(torch.float32).max else scale
    else:
        clean += 1
    floor, cap = single(settings["min_loss_scale"]), single(settings["max_loss_scale"])
    return min(max(single(scale), floor), cap), clean


def flags(*bad):
    return [torch.tensor(float(is_bad)) for is_bad in bad]


NAMES = ("growth_interval", "growth_factor", "backoff_factor", "min_loss_scale", "max_loss_scale")
USUAL = [(3, 2.0, 0.5, 2.0**-3, 2.0**12), (5, 4.0, 0.25, 2.0**-3, 2.0**12)]
EXTREME = [
    (1, 1.0000001, 0.3, 0.1, 2.0**126),
    (2, 1.1, 0.9999999, 2.0**-126, 1e9 / 3),
    (1, 1e30, 1e-30, 2.0**-126, 2.0**126),
    (3, 3.7e37, 0.5, 0.1, 2.0**126),
]


@pytest.fixture(params=[True, False], ids=["kernels", "no kernels"])
def has_kernels(request, monkeypatch):
    """torch's private kernels are used, or there are none, as in a torch without them."""
    if request.param:
        return
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
        patch.delattr(torch, "_amp_update_scale_")
        spec = importlib.util.spec_from_file_location(
            "ampatch.torch_private.without_kernels", amp_kernels.__file__
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    assert module.update_scale_ is None is not amp_kernels.update_scale_
    monkeypatch.setattr(scale_value, "update_scale_", None)
    monkeypatch.setattr(unscaling, "check_and_unscale_", module.check_and_unscale_)


@pytest.mark.usefixtures("has_kernels")
@pytest.mark.parametrize("rule", [*USUAL, *EXTREME])
def test_the_rule_is_that_of_the_paper_to_the_bit(rule):
    """And gradients are divided by the scale, with an inf or NaN of one among them noticed."""
    chance, settings = random.Random(0), dict(zip(NAMES, rule, strict=True))
    scaler = DynamicScaler(init_scale=1e3 / 7, **settings)
    expected, seen = (single(1e3 / 7), 0), set()
    for number in range(300):
        values = torch.randn(5) * 10.0 ** chance.randint(-30, 30)
        if chance.random() < (0.7 if number // 50 % 2 else 0.05):
            values[2] = chance.choice([math.inf, -math.inf, math.nan])
        grads = [values[:2].clone(), values.clone()]
        actual = scaler.unscale_(grads, scaler.snapshot())
        assert bool(actual) == (not values.isfinite().all())
        unscaled = values * single(1 / expected[0])
        torch.testing.assert_close(grads, [unscaled[:2], unscaled], rtol=0, atol=0, equal_nan=True)
        scaler.update([actual])
        expected = ruled(*expected, bool(actual), settings)
        assert scaler.state_dict() == {"loss_scale": expected[0], "unskipped": expected[1]}
        seen.add(expected[0])
    assert rule in EXTREME or {settings["min_loss_scale"], settings["max_loss_scale"]} <= seen


def test_gradients_that_cudas_kernel_does_not_take_are_unscaled_without_it(monkeypatch):
    """It has no bfloat16, at which it raises; the fake device has no values."""
    by_kernel = []
    monkeypatch.setattr(amp_kernels, "kernel", lambda grads, *_: by_kernel.extend(grads))
    for device, left in (("cpu", 3), ("meta", 2)):
        grads = [
            torch.ones(2, dtype=dtype, device=device)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]
        versions = [grad._version for grad in grads]
        numbers = torch.zeros(2, device=device)
        amp_kernels.check_and_unscale_(grads, numbers[0], numbers[1])
        assert len(by_kernel) == left
        written = [grad._version > version for grad, version in zip(grads, versions)]
        assert written == [False, device == "meta", False]
        by_kernel.clear()


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


@pytest.mark.parametrize("value", ["128.0", 128])
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


def test_another_default_device_does_not_draw_the_scale_away():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, dtype=torch.bfloat16, loss_scale="dynamic", verbosity=0)
    loss = model(torch.ones(2, 4)).float().square().mean()
    with torch.device("meta"):
        step(loss, optimizer)
    assert model.weight.isfinite().all() and model.weight.grad.device.type == "cpu"
