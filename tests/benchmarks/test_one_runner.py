"""The runner of the benchmarks: every name is there, and what it prints is what it writes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from bench_modules import load

runner, measuring = load("run"), load("measuring")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    return runner.main()


@pytest.mark.parametrize("name", runner.MODES)
def test_what_a_name_measures_is_there_and_listed(name, monkeypatch, capsys):
    module, _, function = runner.MODES[name].report.partition(":")
    if name == "accuracy":
        pytest.importorskip("sklearn")
    assert callable(getattr(load(module), function))
    assert set(runner.MODES[name].flags) <= set(runner.FLAGS)
    run(monkeypatch, "--list")
    assert any(line.startswith(f"{name} ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["memroy"], "there is no benchmark memroy; --list names them"),
        (["counts", "--rounds", "3"], "it takes no --rounds, but models dtype"),
        (["training", "--models", "VGG"], "invalid choice: 'VGG'"),
    ],
)
def test_wrong_arguments_are_said_at_once(arguments, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_what_was_printed_until_the_end_is_written(tmp_path, monkeypatch, capsys):
    def half(options):
        yield "| a table |\n"
        sys.exit("no more")

    monkeypatch.setitem(sys.modules, "halves", SimpleNamespace(report=half))
    monkeypatch.setitem(runner.MODES, "half", runner.Mode("Half", "halves:report", told="Of it"))
    with pytest.raises(SystemExit, match="no more"):
        run(monkeypatch, "half", "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    head = f"# Half\n\nOf it\n{measuring.machine()}.\n\n    python benchmarks/run.py half --out "
    assert page.startswith(head) and page.endswith("page.md\n\n| a table |\n")
    assert capsys.readouterr().out.strip() == page.strip()


def test_the_ways_take_turns():
    order = []
    ways = {name: lambda name=name: float(len(order.append(name) or order)) for name in "abc"}
    found = measuring.in_turns(ways, 3)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_speed_up_is_the_references_time_over_the_systems():
    times = {"reference": [1.0, 2.0, 4.0], "twice as fast": [0.5, 1.0, 2.0]}
    found = measuring.speed_ups(times, "reference")
    assert found == {"reference": (1, 1, 1), "twice as fast": (2, 2, 2)}
    assert measuring.told(found["twice as fast"]) == "2.00 (2.00 to 2.00)"
