"""Reading, setting, saving and loading the loss scale: it stays a usable number in any case."""

import math

import pytest
import small_training
import torch
from small_training import train
from torch import nn

import ampatch

APEX = {"loss_scale": 512.0, "unskipped": 17}
DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_interval": 2000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "min_loss_scale": 2.0**-24,
    "max_loss_scale": 2.0**24,
}

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


def test_a_static_scale_has_no_settings_and_takes_no_wrong_value():
    start(loss_scale=128.0)
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
    assert (
        ampatch.loss_scale(1) == 4096.0 and ampatch.state_dict()["loss_scaler1"]["unskipped"] == 5
    )


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
def test_a_static_scale_set_on_the_way_comes_back_and_does_not_become_a_dynamic_one(
    then, expected, caplog
):
    """From 1.0 it would take 32000 steps to grow back."""
    start(loss_scale=64.0)
    ampatch.set_loss_scale(256.0)
    state = ampatch.state_dict()
    start(**then)
    ampatch.load_state_dict(state)
    assert ampatch.loss_scale() == expected
    assert ("comes from a static scaler" in caplog.text) == (not then)
