"""What a sweep shows while it runs."""

import io
import re

import pytest
from sweep_made import made_run

from ampatch.sweep.execution.progress import Lines, Live, progress_on
from ampatch.sweep.trial import Case, Trial


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_lines_with_the_time_left():
    stream = io.StringIO()
    shown = progress_on(stream)
    assert isinstance(shown, Lines)
    timing = Trial(Case("O1", "float16"), repeat=1, short=True)
    with shown:
        shown.started(1, 8, Trial(Case("O0")))
        shown.reached(Trial(Case("O0")), 3, 0.5)
        shown.ended(made_run(Case("O0")))  # in 2.5 s
        shown.started(2, 8, Trial(Case("O1", "float16"), seed=1), 3723.4)
        shown.started(4, 8, timing, 5)
    assert stream.getvalue().splitlines() == [
        "[1/8] O0 seed 0: started",
        "[1/8] O0 seed 0: ok, 120 steps of 10.00 ms in 2.5 s",
        "[2/8] O1-float16 seed 1: started, about 1:02:03 left",
        "[4/8] O1-float16 seed 0 repeat 1 (timing): started, about 0:00:05 left",
    ]


def test_a_terminal_gets_level_seed_step_and_loss(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    shown = progress_on(stream, steps=120)
    assert isinstance(shown, Live)
    row = Trial(Case("O1", "float16"), seed=1)
    with shown:
        shown.started(1, 2, Trial(Case("O0")))
        shown.ended(made_run(Case("O0")))
        shown.started(2, 2, row)
        shown.reached(row, 60, 0.25)
    last = stream.getvalue()
    for word in ("(2/2) O1-float16 seed 1", "step 60/120, loss 0.25", "1/2 runs", "120 steps of"):
        assert word in last


def test_long_names_keep_their_seed(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    case = Case("O2", "bfloat16", settings=(("keep_batchnorm_fp32", False),))
    with progress_on(stream) as shown:
        shown.started(2, 20, Trial(case, seed=12))
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"\(2/20\)", shown) and re.search(r"seed\s+12\b", shown)
