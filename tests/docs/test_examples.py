"""The examples train, at every opt level and in both half dtypes.

They run in this process, one after the other, under an observer: starting one takes longer than its
training here.  A sweep starts them as a user does, in the tests of their seeds and of the README.
"""

import importlib.util
import math
import os
import runpy
import sys
import warnings
from itertools import product
from unittest import mock

import pytest
import torch
from repository import EXAMPLES, ROOT

import ampatch
from ampatch.sweep import DTYPES, Sweep, sweep

pytestmark = pytest.mark.usefixtures("warm_trials")

FULL = ("digits", "char_lm")
SHORT = {
    "gan": ("O1", "float16"),
    "vit": ("O1", "bfloat16"),
    "speech": None,
    "finetune": ("O2", "bfloat16"),
    "ddp": ("O3", "float16"),
    "lightning_digits": None,
    "transformers_text": None,
}
"""What each of them runs with in the default tests; the other levels and types are slow tests."""

PACKAGES = {"lightning_digits": "lightning", "transformers_text": "transformers"}
CASES = [("O0", "bfloat16"), *product(("O1", "O2", "O3"), DTYPES)]
SMALL = {
    "digits": ["--epochs", "4", "--width", "128", "--batch-size", "64"],
    "char_lm": ["--steps", "60", "--epochs", "1", "--batch-size", "8", "--length", "32"],
}


class Watcher:
    """The losses and metrics of a training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: dict[str, float] = {}

    def on_loss(self, loss, loss_id) -> None:
        self.losses.append(loss.item())

    def on_metrics(self, values) -> None:
        self.metrics.update(values)


@pytest.fixture(scope="module")
def frameworks():
    """Before torch is looked at: Lightning changes `torch.compile`, transformers `nn.Module`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say at import is not about the examples
        if importlib.util.find_spec("lightning"):
            importlib.import_module("ampatch.integrations.lightning")
        if importlib.util.find_spec("transformers"):
            from transformers import GPT2Config, GPT2LMHeadModel

            GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))


@pytest.fixture
def train(frameworks, tmp_path, monkeypatch):
    """`train(example, level, dtype, *arguments)`: what a `Watcher` sees of the run."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(example: str, level: str, dtype: str, *arguments: str) -> Watcher:
        if example in PACKAGES:
            pytest.importorskip(PACKAGES[example])
            warnings.simplefilter("ignore")  # theirs, about few batches; pytest restores the filter
        options = ["--opt-level", level, "--dtype", dtype, "--device", "cpu", "--seed", "0"]
        monkeypatch.setattr(sys, "argv", [example, *options, *arguments])
        watcher = Watcher()
        end = ampatch.observe(watcher)
        try:
            with mock.patch.dict(os.environ):
                runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
        finally:
            end()
            ampatch.deactivate()
        return watcher

    yield run
    sys.modules.pop("common", None)


QUICK = (("O0", "bfloat16"), ("O1", "bfloat16"), ("O2", "float16"), ("O3", "bfloat16"))
EVERYWHERE = pytest.mark.parametrize(
    "level, dtype",
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)


@EVERYWHERE
def test_digits_and_char_lm_learn_wherever_they_can(train, level, dtype):
    """Not a language model at O3 in float16: Adam's eps of 1e-8 is zero there, 0 / 0 follows."""
    digits = train("digits", level, dtype, *SMALL["digits"])
    assert len(digits.losses) == 92 and digits.losses[-1] < 0.5 < 2 < digits.losses[0]
    assert digits.metrics["test_accuracy"] > 0.85
    text = train("char_lm", level, dtype, *SMALL["char_lm"])
    assert len(text.losses) == 60
    assert text.losses[0] == pytest.approx(math.log(128), rel=0.25)
    if (level, dtype) == ("O3", "float16"):
        assert math.isnan(text.losses[2])
    else:  # 3.2 nats is the loss of always giving the characters' frequencies
        assert text.metrics["heldout_loss"] < 3.0


@pytest.mark.parametrize(
    "example, level, dtype",
    [
        pytest.param(example, *case, marks=() if case == quick else pytest.mark.slow)
        for example, quick in SHORT.items()
        for case in CASES[1:]
    ],
)
def test_a_short_example_trains_everywhere(train, example, level, dtype):
    """One epoch, beside the same in FP32."""
    in_float32, watcher = (train(example, at, dtype, "--epochs", "1") for at in ("O0", level))
    assert len(watcher.losses) == len(in_float32.losses) > 10
    assert watcher.losses != in_float32.losses
    last, reference = (sum(run.losses[-6:]) for run in (watcher, in_float32))
    low = 0 if level == "O3" else 0.85  # at O3 it may well be lower
    assert low * reference < last < (1.4 if level == "O3" else 1.15) * reference
    assert all(map(math.isfinite, watcher.metrics.values()))


@pytest.mark.slow
def test_digits_reaches_its_accuracy(tmp_path):
    """The whole run, at O0: what the rows of a sweep are compared with."""
    pytest.importorskip("sklearn")
    script = str(EXAMPLES / "digits.py")
    [row] = sweep(script, ["--device", "cpu"], levels=["O0"], out=tmp_path)
    assert row.metrics["test_accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("example", ["digits", "char_lm"])
def test_the_seeds_of_a_sweep_reach_an_example(example, tmp_path):
    """Without `{seed}` in its arguments, and without a note on seeds: not even on generators
    that scikit-learn and a DataLoader make for themselves."""
    pytest.importorskip("sklearn")
    script, arguments = str(EXAMPLES / f"{example}.py"), [*SMALL[example], "--device", "cpu"]
    ran = Sweep(script, arguments, levels=["O0"], seeds=2, steps=2, out=tmp_path).run()
    first_losses = {run.measured.losses["0"].values[0] for run in ran.runs}
    assert len(first_losses) == 2
    assert [run.measured.own_seed for run in ran.runs] == ["", ""]


@pytest.mark.parametrize("example", [*FULL, *SHORT])
def test_an_example_explains_itself(train, example, capsys):
    with pytest.raises(SystemExit, match="0"):
        train(example, "O1", "bfloat16", "--help")
    told = capsys.readouterr().out
    assert "--opt-level" in told and "--loss-scale" in told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("example", ["digits.py", "char_lm.py"])
def test_an_example_on_cuda(example, tmp_path):
    pytest.importorskip("sklearn")
    script, arguments = str(EXAMPLES / example), ["--device", "cuda", "--epochs", "2"]
    settings = {"levels": ["O0", "O1", "O2"], "dtypes": DTYPES, "autocast": False, "rounds": 1}
    rows = sweep(script, arguments, **settings, out=tmp_path)
    assert [row.status for row in rows] == ["ok"] * 6  # O0+tf32 among them
    assert {row.memory_kind for row in rows} == {"device"}
    assert all(0 < row.memory_bytes < torch.cuda.mem_get_info()[1] for row in rows)
    assert all(row.last_loss < row.first_loss and row.step_ms > 0 for row in rows)


def test_the_page_links_every_example():
    text = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.glob("*.py")} - {"common.py"}
    assert names == {f"{name}.py" for name in (*FULL, *SHORT, "faults")}  # tests/tune/ runs it
    assert {name for name in names if f"examples/{name})" not in text} == set()
