"""Sessions: what `initialize` returns, how they fail, end, are saved and go on."""

import copy
import gc
import logging
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from repository import HELPERS
from resuming import save_all, start, train
from session_pairs import build, hook_count, one_step, pair, values
from small_training import step
from torch import nn
from torch_snapshot import changes, snapshot
from warm_python import environment, python

import ampatch
from ampatch.api import training
from ampatch.session.session import registry

BF16 = torch.bfloat16


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: (x,)])
def test_the_shape_given_is_the_shape_returned(opt_level, wrap):
    model, optimizer = pair()
    arguments = wrap(model), wrap(optimizer)
    models, optimizers = ampatch.initialize(*arguments, opt_level=opt_level, verbosity=0)
    assert (type(models), type(optimizers)) == (type(arguments[0]), type(arguments[1]))
    assert models == wrap(model) and optimizers == wrap(optimizer)
    alone = wrap(build())
    assert ampatch.initialize(alone, opt_level=opt_level, verbosity=0) == alone
    one_step(model, optimizer, 0)


@pytest.mark.parametrize("first", [None, "O1", "O2"])
@pytest.mark.parametrize("event", ["on_initialize", "on_replaced"])
def test_a_failure_half_way_leaves_nothing_changed(opt_level, event, first, monkeypatch):
    """At O3 too, where weights are rounded; an earlier session goes on."""
    model, optimizer = pair()
    linear, keys = F.linear, [set(vars(module)) for module in model.modules()]
    F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2)).backward()
    optimizer.step()
    if first is not None:
        ampatch.initialize(model, optimizer, opt_level=first, dtype=BF16, verbosity=0)
    before, params = values(model, optimizer), list(model.parameters())
    earlier, hooks = list(registry.sessions), hook_count(model)
    monkeypatch.setenv("AMPATCH_LOSS_SCALE", "128")  # instead of the script's: this is told
    observer = mock.Mock(spec=[event], **{f"{event}.side_effect": ZeroDivisionError})
    stop = ampatch.observe(observer)
    try:
        with pytest.raises(ZeroDivisionError):
            ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    finally:
        stop()
    assert registry.sessions == earlier and hook_count(model) == hooks
    after = values(model, optimizer)
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    for held in (model.parameters(), optimizer.param_groups[0]["params"]):
        assert all(a is b and a.dtype is torch.float32 for a, b in zip(held, params, strict=True))
    if first is None:
        assert F.linear is linear and "step" not in vars(optimizer)
        assert [set(vars(module)) for module in model.modules()] == keys
    else:
        assert ampatch.loss_scale() == 1.0 and one_step(model, optimizer, 0) > 0


@pytest.mark.parametrize("asked", ["O0", "O1", "O2", "O3"])
def test_the_environment_chooses_the_level(monkeypatch, asked, half):
    monkeypatch.setenv("AMPATCH_OPT_LEVEL", asked)
    monkeypatch.setenv("AMPATCH_DTYPE", str(half).removeprefix("torch."))
    model, optimizer = pair()
    settings = {"keep_batchnorm_fp32": True, "loss_scale": 2.0, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level="O2", **settings)
    properties = registry.sessions[-1].properties
    assert (properties.opt_level, properties.dtype) == (asked, half)
    assert model[0].weight.dtype is (half if asked == "O3" else torch.float32)
    assert ampatch.loss_scale() == 2.0


@pytest.mark.parametrize("value, enabled", [("0", False), ("False", False), ("1", True)])
def test_the_environment_switches_it_off(monkeypatch, value, enabled):
    monkeypatch.setenv("AMPATCH_ENABLED", value)
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert (model[0].weight.dtype is torch.float16) is enabled
    one_step(model, optimizer, 0)


# Sessions whose models and optimizers are gone end at the next `initialize` or `deactivate`

SETTINGS = {"dtype": BF16, "loss_scale": "dynamic", "verbosity": 0, "patch_scope": "model"}


def tensors():
    """Ids of all tensors but single numbers: a loss scale stays as long as its session."""
    gc.collect()
    live = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {id(tensor) for tensor in live if tensor.dim()}


@pytest.mark.parametrize("has_optimizer, steps", [(True, 0), (True, 2), (False, 2)])
def test_a_session_whose_members_are_gone_holds_no_weight_and_ends(opt_level, has_optimizer, steps):
    """FP32 calls are as they were; torch is so after the next call of `initialize`."""

    def experiment():
        model, optimizer = pair()
        members = (model, optimizer) if has_optimizer else (model,)
        ampatch.initialize(*members, opt_level=opt_level, **SETTINGS)
        for _ in range(steps):
            loss = model(torch.ones(3, 4)).float().sum()
            if has_optimizer:
                step(loss, optimizer)
                optimizer.zero_grad()

    experiment()  # torch keeps a little for good
    ampatch.deactivate()
    gc.collect()
    before, held = snapshot(), tensors()
    experiment()
    gc.collect()
    assert tensors() <= held
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    kept = nn.Linear(1, 1)
    ampatch.initialize(kept, opt_level="O0", **SETTINGS)
    assert len(registry.sessions) == 1
    ampatch.deactivate()
    assert changes(before, snapshot()) == []


def test_a_session_stays_as_long_as_a_model_or_an_optimizer_is_there():
    """One whose members are gone does not stand for "the session opened last"."""
    model, optimizer = pair()
    ampatch.initialize(model, optimizer, opt_level="O1", **SETTINGS)
    ampatch.initialize(*pair(), opt_level="O1", **{**SETTINGS, "loss_scale": 4.0})
    gc.collect()
    del model
    gc.collect()
    assert ampatch.loss_scale() == 65536.0
    del optimizer
    gc.collect()
    with pytest.raises(ampatch.AmpatchError, match="no ampatch session is open"):
        ampatch.loss_scale()


def test_a_process_that_ends_says_nothing():
    command = [sys.executable, "-W", "error", HELPERS / "ending_sessions.py"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# `state_dict(of=...)` holds the loss scales of one session; `load_state_dict` restores them

SCALE = {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 3}}


def begin(**settings):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O1", **{"verbosity": 0, **settings})
    return model, optimizer


def three():
    """A GAN's three, each with an `initialize` of its own; the second has two losses."""
    scales_and_losses = ((2.0**10, 1), (2.0**12, 2), (2.0**14, 1))
    return [begin(init_scale=n, num_losses=k) for n, k in scales_and_losses]


def test_the_scales_of_each_session_come_back():
    pairs = three()
    for times, (model, optimizer) in enumerate(pairs, 1):
        for _ in range(times):
            step(model(torch.ones(1, 2)).sum() * float("inf"), optimizer)
    states = [copy.deepcopy(ampatch.state_dict(of=model)) for model, _ in pairs]
    scales = [[entry["loss_scale"] for entry in state.values()] for state in states]
    assert scales == [[2.0**9], [2.0**10, 2.0**12], [2.0**11]]
    ampatch.deactivate()
    pairs = three()
    for (_, optimizer), state in zip(pairs, states, strict=True):
        ampatch.load_state_dict(state, of=optimizer)
    assert [ampatch.state_dict(of=model) for model, _ in pairs] == states
    assert ampatch.loss_scale() == states[-1]["loss_scaler0"]["loss_scale"]
    with pytest.raises(ampatch.AmpatchError, match=r"state_dict\(of=\.\.\.\): no session has this"):
        ampatch.state_dict(of=nn.Linear(2, 2))


@pytest.mark.parametrize("call", [ampatch.state_dict, lambda: ampatch.load_state_dict(SCALE)])
def test_that_the_scales_of_earlier_sessions_are_not_meant_is_said(call, caplog, monkeypatch):
    monkeypatch.setattr(training, "logger", logging.getLogger("said.once"))  # as in a new process
    kept = begin(dtype=torch.bfloat16, verbosity=1)
    first, second = begin(verbosity=1), begin(dtype=torch.bfloat16, verbosity=1)
    caplog.clear()
    ampatch.state_dict(of=first[0])
    assert caplog.text == ""
    assert list(call() or ampatch.state_dict()) == ["loss_scaler0"]
    assert "Call it for their models too: ampatch.state_dict(of=model)" in caplog.text
    del kept, first
    gc.collect()
    caplog.clear()
    call()
    assert "of=model" not in caplog.text  # those that are gone, or have no dynamic scale
    del second


@pytest.mark.parametrize(
    "edit, expected, said",
    [
        (lambda state: state.pop("loss_scaler1"), [2.0, 64.0], "not change: loss_scaler1 at 64."),
        (lambda state: state.update(loss_scaler2=SCALE), [2.0, 2.0], "left out: loss_scaler2."),
    ],
    ids=["fewer", "more"],
)
def test_more_or_fewer_scalers_load_what_is_known_and_say_the_rest(edit, expected, said, caplog):
    kept = begin(num_losses=2, init_scale=64.0, verbosity=1)
    state = {f"loss_scaler{n}": {"loss_scale": 2.0, "unskipped": 0} for n in range(2)}
    edit(state)
    caplog.clear()
    ampatch.load_state_dict(state)
    assert [ampatch.loss_scale(n) for n in range(2)] == expected
    assert [said in record.getMessage() for record in caplog.records] == [True]
    del kept


# A resumed run is the uninterrupted run, bit for bit


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    """All levels and half dtypes, optimizers of each kind; loaded in any order."""
    save_all(tmp_path)
    done = python(HELPERS / "resuming.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_saved_runs_have_seen_skips_and_growth():
    """Else the scale's state would not be worth loading."""
    model, optimizer = start("O2", torch.float16, "SGD")
    train(model, optimizer, range(3))
    assert ampatch.step_was_skipped(optimizer)
    train(model, optimizer, range(3, 5))
    assert ampatch.state_dict() == {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 2}}
