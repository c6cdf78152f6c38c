"""`state_dict(of=...)` holds the loss scales of one session; `load_state_dict` restores them."""

import copy
import gc
import logging

import pytest
import torch
from small_training import step
from torch import nn

import ampatch
from ampatch.api import training

SCALE = {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 3}}


def begin(**settings):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O1", **{"verbosity": 0, **settings})
    return model, optimizer


def overflow(model, optimizer, times):
    for _ in range(times):
        step(model(torch.ones(1, 2)).sum() * float("inf"), optimizer)


def three(**settings):
    """A GAN's three, each with an `initialize` of its own; the second has two losses."""
    return [
        begin(init_scale=2.0**n, num_losses=k, **settings) for n, k in ((10, 1), (12, 2), (14, 1))
    ]


def test_the_scales_of_each_session_come_back():
    pairs = three()
    for times, pair in enumerate(pairs, 1):
        overflow(*pair, times)
    states = [copy.deepcopy(ampatch.state_dict(of=model)) for model, _ in pairs]
    assert [[entry["loss_scale"] for entry in state.values()] for state in states] == [
        [2.0**9],
        [2.0**10, 2.0**12],
        [2.0**11],
    ]
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
