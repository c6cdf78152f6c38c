"""Legacy scripts, in tests/compat/scripts, run unedited by `ampatch run`, each in a process.

Each prints JSON at its end: its losses, the dtypes that a layer gave, and what its idiom is about.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import run_command
from repository import TESTS

SCRIPTS = TESTS / "compat" / "scripts"

RUNS = {
    **{path.stem: "" for path in sorted(SCRIPTS.glob("*.py"))},
    "imagenet_resume-O1": "--opt-level O1",
    "imagenet_resume-bf16": "--keep-batchnorm-fp32 False --loss-scale 128.0 --sync_bn",
}
"""The arguments of each run."""


def ampatch_run(folder: Path, name: str) -> dict:
    """What `ampatch run SCRIPT` printed last."""
    folder.mkdir()
    script = str(SCRIPTS / name.partition("-")[0]) + ".py"
    variables = {"AMPATCH_DTYPE": "bfloat16"} if name.endswith("bf16") else {}
    done = run_command.ampatch_run(folder, script, *RUNS[name].split(), **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Every run's last line; each has a folder of its own, and some run at a time."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        futures = {name: pool.submit(ampatch_run, folder / name, name) for name in RUNS}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls_and_half_is_used(results, name):
    losses = results[name]["losses"]
    assert sum(losses[-6:]) < 0.4 * sum(losses[:6])
    half = "bfloat16" if name.endswith("bf16") else "float16"
    assert results[name]["dtypes"] == [f"torch.{half}"]


def test_resuming_by_lazy_init_is_exact_and_levels_and_strings_mean_what_they_say(results):
    for name in ("imagenet_resume", "imagenet_resume-O1", "imagenet_resume-bf16"):
        assert results[name]["exact"] is True
        assert results[name]["weights"] == ["torch.float32"] and results[name]["halves"] == 0
    assert results["imagenet_resume-bf16"]["scale"] == 128.0


def test_a_loss_scale_written_by_hand_takes_effect_and_each_loss_has_its_own(results):
    run = results["bert_accumulation"]
    assert run["scales"][0] in (2.0**19, 2.0**20)  # halved if the first step overflowed
    assert max(run["scales"][5:]) >= 2 * min(run["scales"])  # the interval, written too
    assert results["dcgan"]["scalers"] == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
