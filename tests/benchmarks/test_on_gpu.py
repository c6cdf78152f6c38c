"""`benchmarks/on_gpu.sh` on a CPU: so that the first GPU loses no time."""

import os
import re
import subprocess
import sys

import pytest
from repository import BENCHMARKS

SECTIONS = ["machine", "tests", "counts", "resnet", "gpt", "bert"]
SECTIONS += ["compile", "detection"]


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
