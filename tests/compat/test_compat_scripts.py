"""A legacy script, run unedited by `ampatch run`: it resumes by `_lazy_init_maybe_master_weights`.

It prints JSON at its end.  Other loops: docs/test_docs_from_apex.py.
"""

import json

import pytest
import run_command
from repository import TESTS

RUNS = {
    "O1": "--opt-level O1",
    "O2": "",
    "bf16": "--keep-batchnorm-fp32 False --loss-scale 128.0 --sync_bn",
}
"""The arguments of each run."""


@pytest.mark.parametrize("name", RUNS)
def test_resuming_is_exact_and_levels_and_strings_mean_what_they_say(name, tmp_path):
    script = str(TESTS / "compat" / "scripts" / "imagenet_resume.py")
    variables = {"AMPATCH_DTYPE": "bfloat16"} if name == "bf16" else {}
    done = run_command.ampatch_run(tmp_path, script, *RUNS[name].split(), **variables)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["losses"][-6:]) < 0.4 * sum(result["losses"][:6])
    assert result["dtypes"] == ["torch.bfloat16" if name == "bf16" else "torch.float16"]
    assert result["exact"] is True
    assert result["weights"] == ["torch.float32"] and result["halves"] == 0
    assert name != "bf16" or result["scale"] == 128.0
