"""What a sweep shows while it runs."""

import io

from sweep_made import made_run

from ampatch.sweep.execution.progress import Lines
from ampatch.sweep.trial import Case, Trial


def test_a_pipe_gets_lines_with_the_time_left():
    stream = io.StringIO()
    timing = Trial(Case("O1", "float16"), repeat=1, short=True)
    with Lines(stream) as shown:
        shown.started(1, 0, Trial(Case("O0")))
        shown.progressed(Trial(Case("O0")), 3, 0.5)
        shown.ended(made_run(Case("O0")))  # in 2.5 s
        shown.show_note("a note")
        shown.started(2, 8, Trial(Case("O1", "float16"), seed=1), 3723.4)
        shown.started(4, 8, timing, 5)
    assert stream.getvalue().splitlines() == [
        "[1] O0 seed 0: started",
        "[1] O0 seed 0: ok, 120 steps of 10.00 ms in 2.5 s",
        "Note: a note",
        "[2/8] O1-float16 seed 1: started, about 1:02:03 left",
        "[4/8] O1-float16 seed 0 repeat 1 (timing): started, about 0:00:05 left",
    ]


def test_a_terminal_has_one_line_that_moves_below_those_of_runs_that_have_ended(monkeypatch):
    """Where a name is longer than the line, its end with seed and step is seen."""
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    stream.isatty = lambda: True
    row = Trial(Case("O2", "bfloat16", settings=(("keep_batchnorm_fp32", False),)), seed=12)
    with Lines(stream) as shown:
        shown.started(1, 2, Trial(Case("O0")), 3600)
        shown.ended(made_run(Case("O0")))
        shown.started(2, 2, row)
        shown.progressed(row, 60, 0.25)
        shown.show_note("a note")
    nothing, *lines = stream.getvalue().split("\r\x1b[K")
    assert nothing == "" and [line for line in lines if line.endswith("\n")] == [
        "[1/2] O0 seed 0: ok, 120 steps of 10.00 ms in 2.5 s\n",
        "Note: a note\n",
    ]
    moving = [line for line in lines if line and not line.endswith("\n")]
    assert [len(line) for line in moving] == [39] * 3
    ends = (" seed 0: started, about 1:00:00 left", " seed 12: started", ": step 60, loss 0.25")
    for line, end in zip(moving, ends, strict=True):
        assert line.endswith(end)
