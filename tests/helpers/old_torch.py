"""What older versions of torch lack, and the tests that need it.

By version up to which it is lacking, reason and file: a pattern of names of tests.
`docs/versions.md` tells what else fails there.
"""

from __future__ import annotations

import re

import torch

LACKING = {
    (2, 4): {
        "torch 2.4's Dynamo cannot trace isinstance with an abstract base class": {
            "test_overrides": r"test_overrides_of_functions_at_every_level\[O[23]\]",
        },
        "torch 2.4's Dynamo cannot trace a list in a threading.local, nor a dataclass": {
            "test_compile": r"test_another_model_beside_one_at_o1.*",
            "test_overrides": r"test_a_part_of_an_override_that_the_models_own_code_calls.*",
        },
        "torch 2.4's Dynamo compiles hooks, and asks the weight cache at run time": {
            "test_compile": r"test_hooks_are_not_compiled_as_frames_of_their_own",
        },
        "torch 2.4's schedulers drop the signature of step": {
            "test_steps": r"test_step_keeps_its_signature\[True\]",
        },
    },
}
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def lacking(file: str, test: str) -> str:
    """Why a test cannot pass on the running torch; empty if it can."""
    for version, reasons in LACKING.items():
        for reason, files in reasons.items() if version >= _VERSION else ():
            if re.fullmatch(files.get(file, ""), test):
                return reason
    return ""
