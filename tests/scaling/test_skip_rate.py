"""Skipped steps are said: the first ten, then each doubling; many of the last ones as a warning."""

from __future__ import annotations

import math

import pytest
import torch
from small_training import backward, data, start, train

pytestmark = pytest.mark.usefixtures("scale_lives_on")
on_the_host = pytest.mark.parametrize("scale_lives_on", ["host"], indirect=True)

KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.001, "fused": True}),
}
AT_ONCE = 7  # skips in a row: a fused optimizer's counts are looked at each quarter of them


@pytest.fixture(autouse=True)
def all_is_logged(caplog):
    caplog.set_level("INFO", "ampatch")


def begin(kind="SGD", **settings):
    optimizer_class, options = KINDS[kind]
    settings = {"verbosity": 1, "max_consecutive_skips": AT_ONCE, "init_scale": 2.0**16, **settings}
    return start("O2", optimizer_class, options=options, **settings)


def run(model, optimizer, factors):
    for factor in factors:
        train(model, optimizer, factor=factor)


def said(caplog, level=None):
    return [
        record.getMessage()
        for record in caplog.records
        if "Gradient overflow" in record.getMessage() and level in (None, record.levelname)
    ]


def every(n, steps):
    """Each nth of so many steps overflows."""
    return [math.inf if step % n == n - 1 else 1.0 for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ten_and_then_each_doubling(kind, caplog):
    model, optimizer = begin(kind, growth_interval=10**6)
    run(model, optimizer, every(2, 90))
    assert [message.partition(" since ")[0].rpartition("; ")[2] for message in said(caplog)] == [
        f"{n} of {2 * n}" for n in (*range(1, 11), 20, 40)
    ]
    assert said(caplog)[2] == (
        f"Gradient overflow: a step was skipped ({kind}; 3 of 6 since initialize). "
        "Loss scaler 0 went 16384 -> 8192."
    )
    assert said(caplog)[-1].startswith("Gradient overflow: 20 of 40 steps were skipped")
    assert said(caplog, "WARNING") == said(caplog)[-2:]
    assert "dtype=torch.bfloat16" in said(caplog)[-1] and "learning rate" in said(caplog)[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_for_the_scale_is_no_warning(kind, caplog):
    model, optimizer = begin(kind)
    run(model, optimizer, [math.inf] * 14 + [1.0] * 20)  # a scale of 2**16 comes down
    assert len(said(caplog, "INFO")) == len(said(caplog)) == 10


@on_the_host
def test_one_in_thirty_is_no_warning_and_one_in_ten_afterwards_is(caplog):
    model, optimizer = begin(max_consecutive_skips=50, growth_interval=29)
    run(model, optimizer, every(30, 600))
    assert len(said(caplog)) == 11 and said(caplog, "WARNING") == []
    run(model, optimizer, every(10, 200))
    assert said(caplog, "WARNING") == said(caplog)[-1:]
    assert "20 of 200 steps were skipped (SGD; 40 of 800 since initialize)" in said(caplog)[-1]


@on_the_host
def test_a_long_row_counts_in_the_next_message(caplog):
    """It has an error of its own in between."""
    model, optimizer = begin()
    run(model, optimizer, [*every(2, 20), *[math.inf] * 7, 1.0, *[math.inf] * 3])
    assert said(caplog)[-1].startswith("Gradient overflow: 10 of 11 steps were skipped")
    assert caplog.text.count("in a row were skipped") == 1


@on_the_host
def test_of_several_losses_the_scale_is_told_from_where_it_was_told_last(caplog):
    model, optimizer = begin(num_losses=2)
    for _ in range(2):
        optimizer.zero_grad()
        for loss_id, factor in enumerate((math.inf, 1.0)):
            backward(model, optimizer, data(), factor, loss_id=loss_id)
        optimizer.step()
    assert "Loss scaler 0 went 65536 -> 32768." in said(caplog)[0]
    assert "Loss scaler 0 went 32768 -> 16384." in said(caplog)[1]


@pytest.mark.parametrize("scale_lives_on", ["device"], indirect=True)
def test_what_a_device_counts_is_said_at_the_next_look(caplog):
    """All changes of the scale since the look before, though nothing was waited for."""
    model, optimizer = begin("AdamW", max_consecutive_skips=50)
    run(model, optimizer, [math.inf, 1.0, math.inf] + [1.0] * 9)
    assert said(caplog) == [
        "Gradient overflow: 2 of 12 steps were skipped (AdamW; 2 of 12 since initialize). "
        "Loss scaler 0 went 65536 -> 32768 -> 16384."
    ]


def test_verbosity_0_is_silent(caplog):
    model, optimizer = begin(verbosity=0)
    run(model, optimizer, every(2, 60))
    assert caplog.records == []
