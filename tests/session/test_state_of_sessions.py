"""`state_dict()` holds the loss scales of all open sessions; `load_state_dict` restores them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ampatch


def begin(**settings):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O1", **{"verbosity": 0, **settings})
    return model, optimizer


def overflow(model, optimizer, times=1, loss_id=0):
    for _ in range(times):
        loss = model(torch.ones(1, 2)).sum() * float("inf")
        with ampatch.scale_loss(loss, optimizer, loss_id) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()


def three(**settings):
    """A GAN's three, each with an `initialize` of its own; the second has two losses."""
    return [
        begin(init_scale=2.0**n, num_losses=k, **settings) for n, k in ((10, 1), (12, 2), (14, 1))
    ]


def test_all_scales_come_back():
    pairs = three()
    for times, pair in enumerate(pairs, 1):
        overflow(*pair, times)
    state = copy.deepcopy(ampatch.state_dict())
    assert {name: entry["loss_scale"] for name, entry in state.items()} == {
        "loss_scaler0": 2.0**11,
        "session0.loss_scaler0": 2.0**9,
        "session1.loss_scaler0": 2.0**10,
        "session1.loss_scaler1": 2.0**12,
    }
    assert next(iter(state)) == "loss_scaler0"  # apex's come first
    ampatch.deactivate()
    pairs = three()
    ampatch.load_state_dict(state)
    assert ampatch.state_dict() == state
    scales = []
    for model, optimizer in pairs:
        with ampatch.scale_loss(model(torch.ones(1, 2)).sum() * 0 + 1, optimizer) as scaled:
            scales.append(scaled.item())
    assert scales == [2.0**9, 2.0**10, 2.0**11]


def test_one_session_is_apexs_format():
    kept = begin()
    assert ampatch.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}
    del kept


def test_sessions_that_are_gone_do_not_count():
    pairs = three()
    overflow(*pairs[0])
    overflow(*pairs[1])
    del pairs[0]
    assert list(ampatch.state_dict()) == [
        "loss_scaler0",
        "session0.loss_scaler0",
        "session0.loss_scaler1",
    ]


@pytest.mark.parametrize("grad_scaler", [False, True])
def test_a_state_without_the_other_sessions_is_said(caplog, grad_scaler):
    """An apex checkpoint, or one of an earlier ampatch."""
    pairs = three(verbosity=1)
    state = {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 3}}
    if grad_scaler:
        state = {"scale": 64.0, "_growth_tracker": 3}
    ampatch.load_state_dict(state)
    assert ampatch.loss_scale() == 64.0
    assert (
        "loss scalers, which stay as they are: session0.loss_scaler0 at 1024, "
        "session1.loss_scaler0 at 4096, session1.loss_scaler1 at 4096." in caplog.text
    )
    del pairs


def test_what_an_old_cell_of_a_notebook_has_left_does_not_count():
    """Its output keeps model and optimizer; a state of the new ones loads where there is no old."""
    old = three()
    for pair in old:
        overflow(*pair)
    new = three()
    assert list(ampatch.state_dict()) == ["loss_scaler0"]
    for times, pair in enumerate(new, 1):
        overflow(*pair, times)
    state = copy.deepcopy(ampatch.state_dict())
    assert {name: entry["loss_scale"] for name, entry in state.items()} == {
        "loss_scaler0": 2.0**11,
        "session0.loss_scaler0": 2.0**9,
        "session1.loss_scaler0": 2.0**10,
        "session1.loss_scaler1": 2.0**12,
    }
    for keeps_old in (True, False):
        if not keeps_old:
            ampatch.deactivate()
        again = three()
        ampatch.load_state_dict(state)
        assert ampatch.state_dict() == state
        del again
    del old


@pytest.mark.parametrize(
    "edit, expected, said",
    [
        (lambda state: state.pop("loss_scaler1"), [2.0, 64.0], "as they are: loss_scaler1 at 64."),
        (
            lambda state: state.update(loss_scaler2=state["loss_scaler0"]),
            [2.0, 2.0],
            "loss_scaler2",
        ),
        (lambda state: state.update(epoch=3), [2.0, 2.0], "left out: epoch."),
        (
            lambda state: state.update({"session0.loss_scaler0": state["loss_scaler0"]}),
            [2.0, 2.0],
            "left out: session0.loss_scaler0.",
        ),
    ],
    ids=["fewer", "more", "others", "other sessions"],
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


def test_a_wrong_entry_and_a_state_of_something_else_change_nothing():
    pairs = three()
    for pair in pairs:
        overflow(*pair)
    state = ampatch.state_dict()
    before = copy.deepcopy(state)
    for name in state:
        state[name] = {**state[name], "loss_scale": 2.0}
    for value in (-1.0, 0.0, float("nan")):
        wrong = {**state, "session0.loss_scaler0": {"loss_scale": value, "unskipped": 0}}
        with pytest.raises(ValueError, match=r"state\['session0.loss_scaler0'\]"):
            ampatch.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"\['amp', 'model'\], expected .*'session0.loss_s"):
        ampatch.load_state_dict({"model": {}, "amp": state})
    assert ampatch.state_dict() == before
    del pairs
