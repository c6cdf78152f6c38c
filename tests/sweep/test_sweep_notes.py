"""What a sweep points to where a level fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ampatch.config.sweep_options import SweepOptions
from ampatch.sweep.execution.notes import tune_note
from ampatch.sweep.kinds import UNKNOWN
from ampatch.sweep.report.results import Row

BASE = Row("O0", "O0", "float32", outcome="baseline")
WORSE = Row("O1-bfloat16", "O1", "bfloat16", outcome="worse")
CRASHED = Row("O3-float16", "O3", "float16", status="crashed: RuntimeError", outcome="failed")
DIVERGED = Row("O2-float16", "O2", "float16", status="diverged at step 3", outcome="failed")
KILLED = Row("O3-float16", "O3", "float16", status="killed: by SIGKILL", outcome="failed")
PLAN = SimpleNamespace(kind=UNKNOWN)


def note(*rows: Row, arguments=(), **options) -> str:
    return tune_note("train.py", list(arguments), SweepOptions(**options), PLAN, rows)


@pytest.mark.parametrize("row", (WORSE, CRASHED, DIVERGED))
def test_a_level_that_fails_points_to_tune(row):
    said = note(BASE, KILLED, row)
    assert f"--opt-level {row.opt_level} --dtype {row.dtype}" in said


@pytest.mark.parametrize("rows", ((BASE,), (WORSE,), (CRASHED, WORSE), (BASE, KILLED)))
def test_no_pointer_where_tune_has_no_answer(rows):
    assert not note(*rows)
    failed = Row("O0", "O0", "float32", status="crashed: no data", outcome="failed")
    assert not note(failed, *rows)


def test_the_command_has_what_the_script_was_given():
    said = note(BASE, WORSE, arguments=["--name", "a b", "--seed", "{seed}"], module=True)
    assert said.endswith(
        "ampatch tune -m train.py --opt-level O1 --dtype bfloat16 -- --name 'a b' --seed '{seed}'"
    )
