"""What the terminal says of an answer and of its modules."""

import io

import pytest

from ampatch.tune.answer import Answer
from ampatch.tune.module_call import CallErrors
from ampatch.tune.report import summary, table_rows, troubles, write_terminal
from ampatch.tune.sensitivity import Sensitivity

SAMPLE = CallErrors(1e-3, 1e-2, 0.0, 0.0)


@pytest.fixture
def answer():
    modules = [Sensitivity(path, "Linear", (SAMPLE,)) for path in ("head", "stem")]
    refused = Sensitivity("layers.0.attention", "Cell", (), "it does not run in half: no", True)
    once = Sensitivity("layers.1.attention", "Cell", (), "it does not run a second time: no")
    fields = {"needed": ["head"], "line": "initialize(...)", "modules": [refused, once, *modules]}
    return Answer("train.py", "O3", "float16", "cured", **fields)


def test_the_speed_of_a_cure_is_the_verdict_on_it(answer):
    answer.paces = {"cure": "speed not told apart from O0's on this machine"}
    assert summary(answer)[-1] == f"Speed, with the cure: {answer.paces['cure']}."


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, ""),
        (1e-5, "0.001 %"),
        (0.123, "12 %"),
        (0.994, "99 %"),
        (0.999, "over 99 %"),
        (1, "100 %"),
    ],
)
def test_shares_are_percents_that_can_be_read(share, text):
    head = Sensitivity("head", "Linear", (CallErrors(1e-3, 1e-2, share, share),))
    row = next(table_rows(Answer("t.py", "O2", "float16", "passes", modules=[head])))
    assert row[4:6] == (text, text)


def test_a_module_that_half_refuses_is_not_called_unmeasured(answer):
    assert troubles(answer) == [
        "layers.0.attention: it does not run in half: no",
        "Not measured: layers.1.attention: it does not run a second time: no",
    ]
    assert next(table_rows(answer))[0] == "layers.0.attention"


def test_where_the_modules_are_that_the_table_leaves_out_is_said(answer):
    answer.modules += [Sensitivity(f"body.{n}", "Linear", (SAMPLE,)) for n in range(30)]
    written = io.StringIO()
    write_terminal(answer, written)
    assert "14 more modules are in tune.json." in written.getvalue()
    assert "body.15" in written.getvalue() and "body.16" not in written.getvalue()
