"""The examples train, at every opt level and in both half types."""

import math
import subprocess
import sys

import pytest
import torch
from repository import DOCS, EXAMPLES

from ampatch.sweep import DTYPES, Sweep, sweep

pytestmark = pytest.mark.usefixtures("warm_trials")


def run_everywhere(example, arguments, out):
    pytest.importorskip("sklearn")
    return sweep(
        str(EXAMPLES / example),
        arguments,
        dtypes=DTYPES,
        autocast=False,
        rounds=1,
        out=out,
        timeout=120,
    )


def test_digits_learns_everywhere(tmp_path):
    arguments = ["--epochs", "4", "--device", "cpu", "--width", "128", "--batch-size", "64"]
    rows = run_everywhere("digits.py", arguments, tmp_path)
    assert [row.status for row in rows] == ["ok"] * 7
    assert [row.steps for row in rows] == [92] * 7
    assert all(row.last_loss < 0.5 < 2 < row.first_loss for row in rows)
    assert all(row.metrics["test_accuracy"] > 0.85 for row in rows)


def test_char_lm_learns_wherever_it_can(tmp_path):
    """Well below 3.2 nats, the held-out loss of always giving the characters' frequencies.

    Not at O3 in float16: Adam's eps of 1e-8 is zero there, and 0 / 0 follows.
    """
    arguments = [
        "--steps",
        "60",
        "--epochs",
        "1",
        "--device",
        "cpu",
        "--batch-size",
        "8",
        "--length",
        "32",
    ]
    *rows, bfloat16 = run_everywhere("char_lm.py", arguments, tmp_path)
    float16 = rows.pop()
    assert (float16.opt_level, float16.status) == ("O3", "diverged at step 2: loss nan")
    for row in [*rows, bfloat16]:
        assert (row.status, row.steps) == ("ok", 60)
        assert row.metrics["heldout_loss"] < 3.0
        assert row.first_loss == pytest.approx(math.log(128), rel=0.25)


def test_digits_reaches_its_accuracy(tmp_path):
    """The whole run, at O0: what the rows of a sweep are compared with."""
    script = str(EXAMPLES / "digits.py")
    [row] = sweep(script, ["--device", "cpu"], levels=["O0"], out=tmp_path)
    assert row.metrics["test_accuracy"] >= 0.97


@pytest.mark.parametrize(
    "example, arguments",
    [("digits.py", ["--width", "32"]), ("char_lm.py", ["--batch-size", "2", "--length", "16"])],
)
def test_the_seeds_of_a_sweep_reach_an_example(example, arguments, tmp_path):
    """Without `{seed}` in its arguments, and without a note on seeds: not even on generators
    that scikit-learn and a DataLoader make for themselves."""
    pytest.importorskip("sklearn")
    ran = Sweep(
        str(EXAMPLES / example),
        [*arguments, "--device", "cpu"],
        levels=["O0"],
        seeds=2,
        steps=2,
        out=tmp_path,
    ).run()
    first_losses = {run.measured.losses["0"].values[0] for run in ran.runs}
    assert len(first_losses) == 2
    assert [run.measured.seed_calls for run in ran.runs] == [[], []]


@pytest.mark.parametrize("example", ["digits.py", "char_lm.py"])
def test_an_example_explains_itself(example):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), "--help"],
        env={"PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--opt-level" in done.stdout and "--loss-scale" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("example", ["digits.py", "char_lm.py"])
def test_an_example_on_cuda(example, tmp_path):
    pytest.importorskip("sklearn")
    rows = sweep(
        str(EXAMPLES / example),
        ["--device", "cuda", "--epochs", "2"],
        levels=["O0", "O1", "O2"],
        dtypes=DTYPES,
        autocast=False,
        rounds=1,
        out=tmp_path,
    )
    assert [row.status for row in rows] == ["ok"] * 6  # O0+tf32 among them
    assert {row.memory_kind for row in rows} == {"device"}
    assert all(0 < row.memory_bytes < torch.cuda.mem_get_info()[1] for row in rows)
    assert all(row.last_loss < row.first_loss and row.step_ms > 0 for row in rows)


OTHERS = ("vit", "speech", "finetune", "ddp")
OF_FRAMEWORKS = ("lightning_digits", "transformers_text")
OPTIONS = ["--device", "cpu", "--batch-size", "16", "--seed", "0"]


@pytest.mark.parametrize(
    "example",
    ["gan", *(pytest.param(name, marks=pytest.mark.slow) for name in (*OTHERS, *OF_FRAMEWORKS))],
)
def test_a_short_example_trains_everywhere(example, tmp_path):
    pytest.importorskip("sklearn")
    rows = sweep(
        str(EXAMPLES / f"{example}.py"),
        OPTIONS,
        dtypes=DTYPES,
        autocast=False,
        rounds=1,
        steps=16,
        out=tmp_path,
        timeout=120,
    )
    assert [row.status for row in rows] == ["ok"] * 7
    reference, *halves = [row.last_loss for row in rows]
    assert halves[:4] == pytest.approx([reference] * 4, rel=0.15)
    assert halves[4:] == pytest.approx([reference] * 2, rel=0.4)  # O3
    assert not any(loss == reference for loss in halves)  # that would be FP32


@pytest.mark.parametrize("example", [*OTHERS, *OF_FRAMEWORKS])
def test_an_example_runs(example, tmp_path):
    """Too few steps to learn much; the status would say that the loss diverges."""
    options = {"dtypes": ["bfloat16"], "autocast": False, "steps": 16}
    [row] = sweep(str(EXAMPLES / f"{example}.py"), OPTIONS, levels=["O2"], out=tmp_path, **options)
    assert (row.status, row.steps) == ("ok", 16)
    assert 0 < row.last_loss < 1.5 * row.first_loss


def test_the_site_names_every_example():
    page = (DOCS / "examples.md").read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.glob("*.py")} - {"common.py"}
    assert {name for name in names if f"/{name})" not in page} == set()
