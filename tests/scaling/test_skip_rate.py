"""Overflows are heard before 50 in a row, and at the end; healthy runs are quiet."""

from __future__ import annotations

import gc
import math
import textwrap

import pytest
import torch
from small_training import backward, data, start
from warm_python import python

import ampatch
from ampatch.scaling.step_counts import StepCounter

pytestmark = pytest.mark.usefixtures("scale_lives_on")
on_the_host = pytest.mark.parametrize("scale_lives_on", ["host"], indirect=True)

KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.001, "fused": True}),
}


def begin(kind="SGD", **settings):
    optimizer_class, options = KINDS[kind]
    return start("O2", optimizer_class, options=options, **{"verbosity": 1, **settings})


def run(model, optimizer, factors):
    for factor in factors:
        optimizer.zero_grad()
        backward(model, optimizer, data(), factor)
        optimizer.step()


def said(caplog, what):
    return [r.getMessage() for r in caplog.records if what in r.getMessage()]


def every(n, steps):
    """Each nth of so many steps overflows."""
    return [math.inf if step % n == n - 1 else 1.0 for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tenth_of_the_steps_is_heard_once(kind, caplog):
    model, optimizer = begin(kind, init_scale=1024.0)
    run(model, optimizer, every(10, 120))
    (message,) = said(caplog, "of the last")
    assert message.startswith(f"11 of the last 109 steps of {kind} were skipped") or (
        message.startswith(f"11 of the last 110 steps of {kind} were skipped")
    )
    assert "(11 of 110 since initialize)" in message
    assert "The loss scale went between 0.5 and 1024 and is 0.5." in message
    assert "dtype=torch.bfloat16" in message and "learning rate" in message
    run(model, optimizer, every(10, 80))  # one spell
    assert len(said(caplog, "of the last")) == 1
    run(model, optimizer, [1.0] * 200)
    assert len(said(caplog, "of the last")) == 1
    run(model, optimizer, every(5, 60))
    assert len(said(caplog, "of the last")) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "factors",
    [
        [math.inf] * 14 + [1.0] * 20,  # a scale of 2**16 comes down
        [1.0] * 20,
    ],
)
def test_a_healthy_run_is_quiet(kind, factors, caplog):
    model, optimizer = begin(kind)
    run(model, optimizer, factors)
    ampatch.deactivate()
    assert said(caplog, "skipped") == []


@on_the_host
def test_a_scale_that_grows_into_its_limit_is_healthy():
    """The counter alone, for 20 000 steps: each 2000th is skipped."""
    counter, news = StepCounter(), []
    for step in range(20_000):
        counter.note(step % 2001 == 2000)
        news.append(counter.news(50))
    assert not any(news)
    assert counter.skipped_in_training() == 9


@on_the_host
def test_a_rate_around_the_limit_is_one_spell():
    """Of 200 steps more than 10 are skipped, then fewer, but never half as few, and again."""
    counter, said = StepCounter(), 0
    for gap in ([15] * 14 + [22] * 10) * 3:
        for step in range(gap):
            counter.note(step == gap - 1)
            said += counter.news(50) is not None
    assert said == 1


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_a_search_from_the_start(kind, caplog):
    """Never a step taken: heard with the 17th, and no longer a search for the scale."""
    model, optimizer = begin(kind)
    run(model, optimizer, [math.nan] * 30)
    (message,) = said(caplog, "of the last")
    assert message.startswith(f"17 of the last 17 steps of {kind} were skipped")
    ampatch.deactivate()
    assert said(caplog, "All 30 steps of")


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_training_tells_the_counts(kind, caplog):
    model, optimizer = begin(kind)
    run(model, optimizer, [math.inf, math.inf, 1.0, 1.0, math.nan, 1.0])
    assert said(caplog, "skipped") == []
    ampatch.deactivate()
    assert said(caplog, "skipped") == [
        f"3 of 6 steps of {kind} were skipped because gradients held inf or NaN, 1 of them after "
        "the loss scale was found at first."
    ]
    ampatch.deactivate()
    assert len(said(caplog, "skipped")) == 1


def test_objects_that_go_are_told_of_when_the_next_session_opens(caplog):
    model, optimizer = begin()
    run(model, optimizer, [1.0, math.inf, 1.0])
    del model, optimizer
    gc.collect()
    begin()
    assert len(said(caplog, "1 of 3 steps of SGD were skipped")) == 1


def test_another_initialize_ends_the_training_before(caplog):
    model, optimizer = begin()
    run(model, optimizer, [1.0, math.inf, 1.0])
    ampatch.initialize(model, optimizer, opt_level="O2")
    assert len(said(caplog, "1 of 3 steps of SGD were skipped")) == 1


def test_verbosity_0_is_silent(caplog):
    model, optimizer = begin(verbosity=0)
    run(model, optimizer, every(2, 60))
    ampatch.deactivate()
    assert caplog.records == []


SCRIPT = """
    import torch, ampatch
    def main():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ampatch.initialize(model, optimizer, opt_level="O1")
        for factor in ({factors}):
            optimizer.zero_grad()
            with ampatch.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    main()
"""


@on_the_host
@pytest.mark.parametrize(
    "factors, expected",
    [
        ("float('inf'), 1, 1, float('nan'), 1", "2 of 5 steps of SGD were skipped because"),
        ("float('inf'), 1, 1", None),
    ],
)
def test_a_script_that_ends_tells_too(factors, expected, tmp_path):
    """Without `deactivate`, and with model and optimizer gone by then."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(factors=factors)))
    done = python(script)
    assert done.returncode == 0, done.stderr
    if expected is None:
        assert "were skipped" not in done.stderr
    else:
        assert done.stderr.count(expected) == 1
