"""What a sweep shows while it runs."""

import io

import pytest
from sweep_made import made_run

from ampatch.sweep.execution.progress import Lines, Live, progress_on, shortened
from ampatch.sweep.execution.time_left import TimeLeft
from ampatch.sweep.trial import Case, Trial


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_time_left_is_judged_by_the_runs_that_have_ended():
    clock = Clock()
    left = TimeLeft(clock)
    left.started(1, 4)
    assert left.seconds() is None and left.text() == ""
    clock.now = 10
    left.ended()
    left.started(2, 4)
    clock.now = 14
    assert left.seconds() == 6 + 2 * 10
    assert left.text() == "0:26 left"
    clock.now = 10 + 30  # this one takes longer than the first
    assert left.seconds() == 2 * 10
    left.ended()
    left.started(3, 4)
    assert left.seconds() == 2 * 20  # their mean


def test_the_first_run_is_judged_by_its_steps():
    clock = Clock()
    left = TimeLeft(clock)
    left.started(1, 3)
    clock.now = 5
    assert left.seconds(share=0.01) is None  # it has hardly begun
    assert left.seconds(share=0.25) == 15 + 2 * 20


@pytest.mark.parametrize(("seconds", "text"), [(59.6, "1:00 left"), (3725, "1:02:05 left")])
def test_time_is_minutes_or_hours(seconds, text):
    clock = Clock()
    left = TimeLeft(clock)
    left.started(1, 2)
    clock.now = seconds
    left.ended()
    left.started(2, 2)
    assert left.text() == text


def test_a_pipe_gets_lines():
    stream = io.StringIO()
    shown = progress_on(stream)
    assert isinstance(shown, Lines)
    with shown:
        shown.started(1, 2, Trial(Case("O0")))
        shown.reached(Trial(Case("O0")), 3, 0.5)
        shown.ended(made_run(Case("O0")))
        shown.started(2, 2, Trial(Case("O1", "float16"), seed=1))
    first, second, third = stream.getvalue().splitlines()
    assert first == "[1/2] O0 seed 0: started"
    assert second == "[1/2] O0 seed 0: ok, 120 steps of 10.00 ms in 2.5 s"
    assert third.startswith("[2/2] O1-float16 seed 1: started, about 0:0")


def test_a_terminal_gets_level_seed_step_loss_and_time_left(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    shown = progress_on(stream, steps=120)
    assert isinstance(shown, Live)
    with shown:
        shown.started(1, 2, Trial(Case("O0")))
        shown.ended(made_run(Case("O0")))
        shown.started(2, 2, Trial(Case("O1", "float16"), seed=1))
        shown.reached(Trial(Case("O1", "float16"), seed=1), 60, 0.25)
    last = stream.getvalue()
    for word in ("(2/2) O1-float16 seed 1", "step 60/120", "loss 0.25", "0:00 left"):
        assert word in last


def test_long_names_keep_their_seed():
    name = "(2/2) O2-bfloat16-keep_batchnorm_fp32=False seed 12"
    assert shortened(name, 60) == name
    short = shortened(name, 30)
    assert len(short) == 30 and short.startswith("(2/2) O2") and short.endswith("seed 12")
