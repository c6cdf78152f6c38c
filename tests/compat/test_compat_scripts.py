"""Legacy scripts, in tests/compat/scripts, run unedited by `ampatch run`, each in a process.

Every script prints one line of JSON at its end: its losses, the dtypes that a
layer gave, and what its idiom is about.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import run_command
from repository import TESTS

SCRIPTS = TESTS / "compat" / "scripts"

RUNS = {
    "imagenet_resume": ("imagenet_resume.py", [], {}),
    "imagenet_resume-bf16": (
        "imagenet_resume.py",
        ["--keep-batchnorm-fp32", "False", "--loss-scale", "128.0", "--sync_bn"],
        {"AMPATCH_DTYPE": "bfloat16"},
    ),
    "imagenet_resume-O1": ("imagenet_resume.py", ["--opt-level", "O1"], {}),
    "bert_accumulation": ("bert_accumulation.py", [], {}),
    "dcgan": ("dcgan.py", [], {}),
    "lists_and_decorators": ("lists_and_decorators.py", [], {}),
    "old_handle": ("old_handle.py", [], {}),
    "old_handle-O0": ("old_handle.py", [], {"AMPATCH_OPT_LEVEL": "O0"}),
    "fp16_utils_lm": ("fp16_utils_lm.py", [], {}),
    "larc_outputs": ("larc_outputs.py", [], {}),
    "larc_outputs-off": ("larc_outputs.py", ["--no-amp"], {}),
}


def ampatch_run(folder: Path, script: str, arguments: list[str], variables: dict) -> dict:
    """What `ampatch run SCRIPT` printed last."""
    folder.mkdir()
    done = run_command.ampatch_run(folder, str(SCRIPTS / script), *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Every run's last line; some run at a time."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        futures = {
            name: pool.submit(ampatch_run, folder / name, *run) for name, run in RUNS.items()
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls_and_half_is_used(results, name):
    losses = results[name]["losses"]
    assert sum(losses[-6:]) < 0.4 * sum(losses[:6])
    expected = {"bf16": "torch.bfloat16", "off": "torch.float32", "O0": "torch.float32"}
    assert results[name]["dtypes"] == [expected.get(name.partition("-")[2], "torch.float16")]


def test_resuming_by_lazy_init_is_exact_and_levels_and_strings_mean_what_they_say(results):
    for name in ("imagenet_resume", "imagenet_resume-O1", "imagenet_resume-bf16"):
        assert results[name]["exact"] is True
        assert results[name]["weights"] == ["torch.float32"] and results[name]["halves"] == 0
    assert results["imagenet_resume-bf16"]["scale"] == 128.0


def test_a_loss_scale_written_by_hand_takes_effect(results):
    found = results["bert_accumulation"]
    assert found["scales"][0] in (2.0**19, 2.0**20)  # halved if the first step overflowed
    assert max(found["scales"][5:]) >= 2 * min(found["scales"])  # the interval, written too
    before, after = found["second"]
    assert after < before


def test_three_losses_have_three_scalers(results):
    assert results["dcgan"]["scalers"] == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]


def test_edited_lists_and_decorators(results):
    found = results["lists_and_decorators"]
    assert found["seen"] == {
        "softmax": "torch.float16",
        "sigmoid": "torch.float32",
        "tanh": "torch.float32",
        "float_function": "torch.float32",
        "half_function": "torch.float16",
        "disabled": "torch.float32",
    }
    assert found["after"] == "torch.float32"  # the handle was deactivated
    assert found["scale"] == 2.0**14  # the cap


def test_the_oldest_api(results):
    assert results["old_handle"]["banned"] is True
    assert results["old_handle"]["after"] == "torch.float32"
    assert results["old_handle-O0"]["banned"] is False


def test_master_weights_by_hand(results):
    second = results["fp16_utils_lm"]["second"]
    assert second[-1] < 0.4 * second[0]


def test_outputs_and_an_inf_written_into_a_gradient(results):
    found = results["larc_outputs"]
    assert found["outputs"] == ["torch.float16"]
    assert [step for step, moved in enumerate(found["moved"]) if not moved] == [10]
    assert found["fused"] is False
    assert all(results["larc_outputs-off"]["moved"])
