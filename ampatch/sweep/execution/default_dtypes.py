"""The half types of a sweep that was not given any: those that `ampatch doctor` calls fast here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from ampatch.diagnose.speed import fast_half_types
from ampatch.launch.script import PACKAGE_ROOT
from ampatch.torch_private.devices import accelerator

NONE_IS_FAST = ["bfloat16"]  # needs no loss scaling, and is the less slow one on a CPU
_ASK = """
import sys
sys.path.insert(0, sys.argv[1])
from ampatch.diagnose.speed import fast_half_types
print(*fast_half_types())
"""


def default_dtypes() -> Sequence[str]:
    """The fast half types.  Raises `ValueError` if an accelerator does not answer."""
    return (_of_accelerator() if accelerator() else fast_half_types("cpu")) or NONE_IS_FAST


def _of_accelerator() -> list[str]:
    """Asked in a process of its own: to ask here would occupy the device during the sweep."""
    command = [sys.executable, "-c", _ASK, PACKAGE_ROOT]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise ValueError(
            f"The half types could not be timed on the device ({accelerator()}): {reason}. Name "
            "those that you want with --dtypes, such as --dtypes bfloat16."
        )
    return answer.stdout.split()
