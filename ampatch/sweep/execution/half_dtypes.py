"""Measures before the first trial which half dtypes are fast on this machine, and how fast."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from ampatch.diagnose.speed import HalfSpeeds, half_speeds
from ampatch.launch.script import PACKAGE_ROOT
from ampatch.torch_private.devices import accelerator

FALLBACK = ("bfloat16",)  # if no half dtype is fast: no loss scale, faster than float16 on a CPU
_MEASURE_IN_CHILD = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from ampatch.diagnose.speed import half_speeds
print(json.dumps(dataclasses.asdict(half_speeds())))
"""


def measure_half_dtypes() -> HalfSpeeds:
    """Time the half dtypes; `fast` is `FALLBACK` if none is fast.  Takes a few seconds.

    Raises `ValueError` if an accelerator does not answer.
    """
    speeds = _measure_in_child() if accelerator() else half_speeds("cpu")
    return dataclasses.replace(speeds, fast=speeds.fast or FALLBACK)


def _measure_in_child() -> HalfSpeeds:
    """Measure in a child process, so that the sweep's process holds no memory of the device."""
    command = [sys.executable, "-c", _MEASURE_IN_CHILD, PACKAGE_ROOT]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        reason = child.stderr.strip().rpartition("\n")[2]
        raise ValueError(
            f"The half dtypes could not be timed on the device ({accelerator()}): {reason}. Name "
            "the dtypes with --dtypes, such as --dtypes bfloat16, and give --seeds."
        )
    return HalfSpeeds(**json.loads(child.stdout))
