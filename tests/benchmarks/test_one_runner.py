"""The runner of the benchmarks, what they compare, and `benchmarks/on_gpu.sh`."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from bench_modules import load
from repository import BENCHMARKS

import ampatch

runner, measuring = load("run"), load("measuring")
systems, tasks = load("systems"), load("tasks")

MODELS = ("MLP, 8 layers", "transformer, d=16", "GAN")
EAGER = [name for name in systems.SITUATIONS if name != "compile"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    return runner.main()


def test_what_a_name_measures_is_there_and_listed(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    run(monkeypatch, "--list")
    listed = capsys.readouterr().out
    for name, mode in runner.MODES.items():
        module, _, function = mode.report.partition(":")
        assert callable(getattr(load(module), function))
        assert set(mode.flags) <= set(runner.FLAGS)
        assert f"\n{name} " in f"\n{listed}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["memroy"], "there is no benchmark memroy; --list names them"),
        (["counts", "--rounds", "3"], "it takes no --rounds, but models dtype"),
        (["training", "--models", "VGG"], "invalid choice: 'VGG'"),
        (["accuracy", "--seeds", "0"], "must be 1 or more"),
        (["accuracy", "--out", "/no/such/place.md"], "there is no directory /no/such"),
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


def test_a_speed_up_is_the_references_time_over_the_systems():
    times = {"reference": [1.0, 2.0, 4.0], "twice as fast": [0.5, 1.0, 2.0]}
    ratios = measuring.speed_ups(times, "reference")
    assert ratios == {"reference": (1, 1, 1), "twice as fast": (2, 2, 2)}
    assert measuring.told(ratios["twice as fast"]) == "2.00 (2.00 to 2.00)"


def moved(name, system, situation):
    """How far a step moves every weight."""
    torch.manual_seed(0)
    task = tasks.TASKS[name]()
    parameters = [p for module in task.modules for p in module.parameters()]
    before = [p.detach().double().clone() for p in parameters]
    try:
        systems.make_step(task, system, systems.How(situation=situation))()
        return torch.cat([(p.detach() - old).flatten() for p, old in zip(parameters, before)])
    finally:
        ampatch.deactivate()


@pytest.mark.parametrize("situation", EAGER)
@pytest.mark.parametrize("name", MODELS)
def test_o1_does_the_work_of_autocast_and_that_of_fp32(name, situation):
    ours, theirs = moved(name, "O1", situation), moved(name, systems.AUTOCAST, situation)
    plain = moved(name, systems.FP32, situation)
    assert plain.norm() > 0
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert (ours - plain).norm() < 0.1 * plain.norm()
    if situation == "accumulation":
        once = moved(name, systems.FP32, "plain")
        if name != "GAN":  # its generator has moved when the discriminator's loss is computed
            assert (plain - systems.MICRO_BATCHES * once).norm() < 0.01 * plain.norm()


@pytest.mark.parametrize("part", [None, object()], ids=["none", "built"])
def test_native_columns_are_there_if_the_part_is_with_a_variable_of_their_own(part, monkeypatch):
    monkeypatch.setattr(systems, "native", SimpleNamespace(part=part))
    columns = systems.with_native(["autocast", "O1"])
    assert columns == ["autocast", "O1"] + (["O1 native"] if part else [])
    variables = {name: systems.environment(name)["AMPATCH_NATIVE"] for name in columns}
    assert variables == {name: "1" if "native" in name else "0" for name in columns}


# `benchmarks/on_gpu.sh` on a CPU: so that the first GPU loses no time

SECTIONS = ["machine", "tests", "counts", "resnet", "gpt", "bert", "compile", "detection"]


def on_gpu(*arguments, **variables):
    """The finished script, with this Python."""
    return subprocess.run(
        [str(BENCHMARKS / "on_gpu.sh"), *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=1500,
    )


def page_of(folder):
    """The text of the one page that was written."""
    [page] = folder.glob("*-small.md")
    return page.read_text()


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--fast"], {}, "unknown argument --fast"),
        (["--only", "gpt,gtp"], {}, "there is no section gtp"),
        (["--out"], {}, "--out: a value is missing"),
        (["--device", "cpu"], {}, "With --small it runs on the CPU"),
        (["--small"], {"PYTHON": "/bin/false"}, "/bin/false lacks torch or wrapt"),
    ],
)
def test_what_cannot_run_is_said_at_once(arguments, variables, said, tmp_path):
    done = on_gpu(*arguments, **variables)
    assert done.returncode == 2 and said in done.stderr and "NAMES" in done.stderr


@pytest.mark.slow
def test_a_section_that_fails_stops_no_other(tmp_path):
    (tmp_path / "pytest.py").write_text("raise ImportError('not here')")
    options = ["--small", "--device", "cpu", "--only", "tests,machine", "--out", tmp_path]
    done = on_gpu(*options, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout
    assert "tests: failed, exit status 1" in done.stdout and "machine: ok" in done.stdout
    assert "pip install pytest" in page_of(tmp_path)


@pytest.mark.slow
def test_everything_in_small(tmp_path):
    done = on_gpu("--small", "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 0, done.stdout
    page = page_of(tmp_path)
    assert re.findall(r"^- (\w+): ok", page, re.MULTILINE) == SECTIONS
    for name, part in zip(SECTIONS, page.split("\n## ")[1:], strict=False):
        lines = part.splitlines()
        assert lines[0] == name and len(lines) > 8, part
        assert "failed" not in part
    assert "O1 compiled" in page and "O3" in page


@pytest.mark.slow
def test_what_was_measured_until_the_end_is_shown(tmp_path):
    command = [sys.executable, "run.py", "gpu", "--small", "--device", "cpu", "--rounds", "0"]
    running = subprocess.Popen(
        [*command, "--dtypes", "bfloat16", "--compile"],
        cwd=BENCHMARKS,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "ResNet-50, bfloat16, autocast" in running.stderr.readline()
    running.terminate()
    shown, _ = running.communicate(timeout=60)
    assert running.returncode == 1 and "| ResNet-50 | bfloat16 | autocast |" in shown
