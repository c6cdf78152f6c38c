"""The loss scale: its rule, limits and home; reading, setting, saving and loading it.

It stays a usable number in any case.
"""

import importlib
import math
import random

import pytest
import small_training
import torch
from small_training import step, train
from torch import nn

import ampatch
from ampatch.scaling import scale_value, unscaling
from ampatch.scaling.loss_scaler import DynamicScaler, StaticScaler
from ampatch.torch_private import amp_kernels

APEX = {"loss_scale": 512.0, "unskipped": 17}
DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_interval": 2000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "min_loss_scale": 2.0**-24,
    "max_loss_scale": 2.0**24,
}

pytestmark = pytest.mark.usefixtures("scale_lives_on")
KEPT = []  # a session ends with its model and optimizer


def start(level="O1", **settings):
    settings = {"verbosity": 1, "init_scale": 2.0**16, **settings}
    KEPT[:] = small_training.start(level, options={"lr": 0.0}, **settings)
    return KEPT


def everything():
    return ampatch.state_dict(), [ampatch.loss_scale_settings(loss_id) for loss_id in range(2)]


def test_settings_are_those_of_initialize():
    start()
    assert ampatch.loss_scale_settings() == DEFAULTS
    settings = {name: value * 4 for name, value in DEFAULTS.items() if name != "backoff_factor"}
    start(**settings, backoff_factor=0.25)
    assert ampatch.loss_scale_settings() == {**settings, "backoff_factor": 0.25}


def test_settings_count_from_now_on_and_for_one_loss():
    model, optimizer = start(init_scale=1024.0, num_losses=2)
    ampatch.set_loss_scale_settings(
        1, growth_interval=2, growth_factor=8.0, backoff_factor=0.25, max_loss_scale=2.0**14
    )
    scales = []
    for factor in (1.0, 1.0, 1.0, 1.0, math.inf, 1.0):
        train(model, optimizer, factor=factor, loss_id=1)
        scales.append(ampatch.loss_scale(1))
    assert scales == [1024.0, 8192.0, 8192.0, 16384.0, 4096.0, 4096.0]
    assert ampatch.loss_scale(0) == 1024.0
    assert ampatch.loss_scale_settings(0) == {**DEFAULTS, "init_scale": 1024.0}


def test_a_new_initial_scale_starts_anew_and_new_limits_draw_the_scale_in():
    train(*start())
    ampatch.set_loss_scale_settings(init_scale=256.0)
    state = ampatch.state_dict()["loss_scaler0"]
    assert (state["loss_scale"], state["unskipped"]) == (256.0, 0)
    start()
    ampatch.set_loss_scale_settings(max_loss_scale=1024.0)
    assert ampatch.loss_scale() == 1024.0
    ampatch.set_loss_scale(4096)
    assert ampatch.loss_scale() == 1024.0
    ampatch.set_loss_scale_settings(min_loss_scale=2048.0, max_loss_scale=8192.0)
    assert ampatch.loss_scale() == 2048.0


@pytest.mark.parametrize("interval, loaded", [(100, {}), (4, {}), (4, {"growth_interval": 3})])
def test_a_count_beyond_a_shorter_interval_still_grows(interval, loaded):
    """torch's kernel grows when the count *equals* the interval: one beyond it never does."""
    model, optimizer = start(init_scale=256.0, growth_interval=interval)
    entry = {"loss_scale": 256.0, "unskipped": 10, **loaded}
    ampatch.load_state_dict({"loss_scaler0": entry})
    if interval == 100:
        ampatch.set_loss_scale_settings(growth_interval=4)
    train(model, optimizer)
    assert ampatch.loss_scale() == 512.0


SETTING, SCALE, STATE = (
    f"ampatch.{name}(" for name in ("set_loss_scale_settings", "set_loss_scale", "load_state_dict")
)
CALLS = {
    SETTING: lambda wrong: ampatch.set_loss_scale_settings(1, **wrong),
    SCALE: lambda wrong: ampatch.set_loss_scale(wrong, 1),
    STATE: ampatch.load_state_dict,
}


def both(**changed):
    """A state of two losses, the second with something changed."""
    return {"loss_scaler0": APEX, "loss_scaler1": {**APEX, **changed}}


@pytest.mark.parametrize(
    "call, wrong, error, words",
    [
        (SETTING, {"growth_interval": 0}, ValueError, "growth_interval=0: expected at least 1"),
        (SETTING, {"min_loss_scale": 2.0**25}, ValueError, "above max_loss_scale"),
        (SETTING, {"growth_intervall": 3}, TypeError, 'Did you mean "growth_interval"?'),
        (SETTING, {"min_loss_scale": 8, "max_loss_scale": 0.0}, ValueError, "max_loss_scale=0.0"),
        *((SCALE, value, ValueError, "value=") for value in (0, math.inf, "big")),
        *((SCALE, value, TypeError, "value=") for value in (None, True)),
        (STATE, None, TypeError, "got None"),
        (STATE, {}, ValueError, ""),
        (STATE, {"model": {}, "amp": both()}, ValueError, "['amp', 'model'], expected"),
        (STATE, {"loss_scaler0": APEX, "loss_scaler1": None}, TypeError, "loss_scaler1"),
        (STATE, {"loss_scaler0": APEX, "loss_scaler1": {"unskipped": 1}}, ValueError, "scaler1"),
        (STATE, both(loss_scale=math.inf), ValueError, "loss_scaler1"),
        (STATE, both(loss_scale="512"), TypeError, "loss_scaler1"),
        (STATE, both(unskipped=-1), ValueError, "loss_scaler1"),
        (STATE, both(growth_factor=0.5), ValueError, "loss_scaler1"),
        (STATE, {"scale": math.nan, "_growth_tracker": 0}, ValueError, "nan"),
        (STATE, {"scale": 8.0, "_growth_tracker": 0, "growth_interval": 0}, ValueError, "interval"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_and_changes_nothing(call, wrong, error, words):
    start(num_losses=2)
    before = everything()
    with pytest.raises(error) as raised:
        CALLS[call](wrong)
    assert str(raised.value).startswith(call) and words in str(raised.value)
    assert everything() == before


def test_a_static_scale_has_no_settings_and_stays():
    train(*start(loss_scale=128), factor=math.inf)
    assert ampatch.loss_scale_settings() == {}
    with pytest.raises(ampatch.AmpatchError, match="is static"):
        ampatch.set_loss_scale_settings(growth_interval=5)
    for wrong in (0, math.nan, None, True):
        with pytest.raises((TypeError, ValueError), match=r"set_loss_scale\(value="):
            ampatch.set_loss_scale(wrong)
    assert ampatch.loss_scale() == 128.0


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 1e300, "max_loss_scale": 1e300},
        {"init_scale": 1e-300, "min_loss_scale": 1e-300},
        {"min_loss_scale": 1e300, "max_loss_scale": 1e301},
        {"min_loss_scale": 1e-301, "max_loss_scale": 1e-300},
        {"growth_interval": 1, "growth_factor": 1e300, "max_loss_scale": 1e38},
        {"backoff_factor": 1e-300},
        {"growth_interval": 2**40},
    ],
    ids=str,
)
def test_no_setting_makes_a_scale_that_kills(settings):
    model, optimizer = start("O2", dtype=torch.bfloat16, loss_scale="dynamic", **settings)
    for factor in [1.0, 1.0, math.inf, 1.0, math.nan, 1.0, math.inf, 1.0]:
        train(model, optimizer, factor=factor)
        scale = ampatch.loss_scale()
        assert 2.0**-126 <= scale <= 2.0**126
        # what unscaling multiplies by is a number too
        assert 0 < (1.0 / torch.tensor(scale, dtype=torch.float32)).item() < math.inf
    assert all(param.isfinite().all() for param in ampatch.master_params(optimizer))


@pytest.mark.parametrize("value", [1e39, 1e300, 1e-39, 1e-300])
def test_a_static_scale_that_float32_cannot_invert_is_refused(value):
    with pytest.raises(ValueError, match="loss_scale=.*which FP32 can invert"):
        start(loss_scale=value)
    start(loss_scale=64.0)
    with pytest.raises(ValueError, match="which FP32 can invert"):
        ampatch.set_loss_scale(value)
    assert ampatch.loss_scale() == 64.0


def test_settings_changed_on_the_way_are_saved_and_come_back():
    changed = {"growth_interval": 7, "growth_factor": 3.0, "max_loss_scale": 2.0**20}
    start()
    assert set(ampatch.state_dict()["loss_scaler0"]) == {"loss_scale", "unskipped"}  # apex's
    ampatch.set_loss_scale_settings(**changed)
    ampatch.load_state_dict({"loss_scaler0": APEX | {"unskipped": 5}})
    state = ampatch.state_dict()
    assert state == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 5, **changed}}
    start()
    ampatch.load_state_dict(state)
    assert ampatch.state_dict() == state
    assert ampatch.loss_scale_settings() == {**DEFAULTS, **changed}


def test_the_state_of_torchs_gradscaler_loads():
    theirs = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=9, growth_factor=3.0)
    weight = nn.Parameter(torch.zeros(2))
    other = torch.optim.SGD([weight], lr=0.0)
    for _ in range(5):
        theirs.scale(weight.sum()).backward()
        theirs.step(other)
        theirs.update()
    model, optimizer = start(num_losses=2)
    ampatch.load_state_dict(theirs.state_dict())
    for _ in range(4):
        train(model, optimizer)
        theirs.scale(weight.sum()).backward()
        theirs.step(other)
        theirs.update()
    assert ampatch.loss_scale(0) == theirs.get_scale() == 3 * 4096.0
    assert ampatch.loss_scale(1) == 4096.0
    assert ampatch.state_dict()["loss_scaler1"]["unskipped"] == 5


@pytest.mark.parametrize("floor, cap, expected", [(1.0, 64.0, 64.0), (1024.0, 2.0**20, 1024.0)])
def test_what_is_loaded_stays_within_the_limits(floor, cap, expected):
    start(min_loss_scale=floor, max_loss_scale=cap)
    ampatch.load_state_dict({"loss_scaler0": APEX})
    assert ampatch.loss_scale() == expected


@pytest.mark.parametrize(
    "level, settings, level_of_log, said",
    [
        ("O1", {"loss_scale": 1.0}, "WARNING", "512 comes from a dynamic scaler; the static scale"),
        ("O2", {"dtype": torch.bfloat16}, "INFO", "is not needed here: gradients have the range"),
    ],
    ids=["static", "bfloat16"],
)
def test_a_dynamic_scale_does_not_become_a_static_one(level, settings, level_of_log, said, caplog):
    """Without a look at overflow, float16 gradients would be inf, and so the weights.

    In bfloat16 nothing is to be done, so nothing is recommended.
    """
    start(level, **settings)
    caplog.clear()
    with caplog.at_level("INFO", logger="ampatch"):
        ampatch.load_state_dict({"loss_scaler0": APEX})
    assert ampatch.loss_scale() == 1.0 and said in caplog.text
    assert ("set_loss_scale" in caplog.text) == (level_of_log == "WARNING")
    assert {record.levelname for record in caplog.records} == {level_of_log}


@pytest.mark.parametrize("then, expected", [({}, 65536.0), ({"loss_scale": 64.0}, 256.0)])
def test_a_static_scale_comes_back_and_does_not_become_a_dynamic_one(then, expected, caplog):
    """From 1.0 it would take 32000 steps to grow back."""
    start(loss_scale=64.0)
    ampatch.set_loss_scale(256.0)
    state = ampatch.state_dict()
    start(**then)
    ampatch.load_state_dict(state)
    assert ampatch.loss_scale() == expected
    assert ("comes from a static scaler" in caplog.text) == (not then)


# The rule, its limits, where the scale lives


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
    monkeypatch.setattr(amp_kernels, "unscale_kernel", lambda grads, *_: by_kernel.extend(grads))
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
