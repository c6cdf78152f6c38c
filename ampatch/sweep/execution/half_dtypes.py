"""Which half dtypes are fast here, and how fast: measured before the first trial of a sweep."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from ampatch.diagnose.speed import HalfTypes, half_dtypes
from ampatch.launch.script import PACKAGE_ROOT
from ampatch.torch_private.devices import accelerator

NONE_IS_FAST = ("bfloat16",)  # needs no loss scaling, and is the less slow one on a CPU
_ASK = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from ampatch.diagnose.speed import half_dtypes
print(json.dumps(dataclasses.asdict(half_dtypes())))
"""


def measured() -> HalfTypes:
    """The fast half dtypes, or `NONE_IS_FAST`, and the speeds of all; takes a few seconds.

    Raises `ValueError` if an accelerator does not answer.
    """
    types = _of_accelerator() if accelerator() else half_dtypes("cpu")
    return dataclasses.replace(types, fast=types.fast or NONE_IS_FAST)


def _of_accelerator() -> HalfTypes:
    """Timed in a child process: this process would hold memory of the device during the sweep."""
    command = [sys.executable, "-c", _ASK, PACKAGE_ROOT]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise ValueError(
            f"The half dtypes could not be timed on the device ({accelerator()}): {reason}. Name "
            "those that you want with --dtypes, such as --dtypes bfloat16, and give --seeds."
        )
    return HalfTypes(**json.loads(answer.stdout))
