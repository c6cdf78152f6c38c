"""`ampatch tune` on a training whose faults are known, from the command to the pasted answer."""

import json
from pathlib import Path

import pytest

from ampatch.cli import main
from ampatch.sweep import read_results
from ampatch.tune import read_answer

pytestmark = pytest.mark.usefixtures("warm_trials")

SCRIPT = str(Path(__file__).parents[2] / "examples" / "faults.py")
QUICK = ("--seeds", "4", "--probe-steps", "20", "--rounds", "1", "--jobs", "2", "--margin", "2%")


def tune(folder, fault, *options, level="O2"):
    arguments = ["--fault", fault, "--seed", "{seed}", "--steps", "25"]
    command = ["tune", SCRIPT, "--opt-level", level, "--out", str(folder), *QUICK, *options]
    return main.main([*command, "--", *arguments])


def test_one_softmax_is_found_and_nothing_of_it_is_run_again(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "out"
    assert tune(folder, "softmax") == 0
    out, err = capsys.readouterr()
    answer = read_answer(folder)
    assert "computes 4 of its calls" in err and "8 modules and settings to try" in err
    assert answer.outcome == "cured" and answer.is_smallest
    assert answer.needed == ["weigh"] and answer.settings == {}
    assert 'overrides={"weigh": "float"}' in out and answer.line in out
    assert json.loads((folder / "overrides.json").read_text()) == {"weigh": "float"}
    assert {"cure"} == set(answer.speeds)  # the level has failed
    recommendation = "O2 in float16 trains as O0 does with 1 module in FP32: weigh."
    assert (
        recommendation in out and recommendation in (folder / "report.html").read_text()
    )  # one answer
    assert read_results(folder).recommendation.startswith(recommendation)
    assert [line.split()[:3] for line in out.splitlines() if line.split()[-1:] == ["needed"]] == [
        ["weigh", "Weigh", "inf"]
    ]

    monkeypatch.setattr("ampatch.sweep.execution.runner.Runner.run", None)  # no trial is started
    assert tune(folder, "softmax", "--resume") == 0
    assert read_answer(folder) == answer
