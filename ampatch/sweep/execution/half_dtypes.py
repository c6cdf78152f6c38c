"""Which half dtypes are fast here, and how fast: measured before the first trial of a sweep."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from ampatch.diagnose.speed import HalfSpeeds, half_speeds
from ampatch.launch.script import PACKAGE_ROOT
from ampatch.torch_private.devices import accelerator

NONE_IS_FAST = ("bfloat16",)  # where none is: no loss scale, and quicker than float16 on a CPU
_MEASURE_IN_CHILD = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from ampatch.diagnose.speed import half_speeds
print(json.dumps(dataclasses.asdict(half_speeds())))
"""


def measure_half_dtypes() -> HalfSpeeds:
    """Time the half dtypes; `fast` is `NONE_IS_FAST` if none is.  Takes a few seconds.

    Raises `ValueError` if an accelerator does not answer.
    """
    speeds = _of_accelerator() if accelerator() else half_speeds("cpu")
    return dataclasses.replace(speeds, fast=speeds.fast or NONE_IS_FAST)


def _of_accelerator() -> HalfSpeeds:
    """Timed in a child process, so that the sweep's process holds no memory of the device."""
    command = [sys.executable, "-c", _MEASURE_IN_CHILD, PACKAGE_ROOT]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise ValueError(
            f"The half dtypes could not be timed on the device ({accelerator()}): {reason}. Name "
            "those that you want with --dtypes, such as --dtypes bfloat16, and give --seeds."
        )
    return HalfSpeeds(**json.loads(answer.stdout))
