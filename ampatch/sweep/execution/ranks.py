"""A trial of several processes, started by torchrun (`--nproc-per-node`).

Rank 0 records.  The other ranks run the script in the same environment, and torchrun writes what
they print to files.  If the trial fails, these files are appended to its log.  Each rank writes how
it ended to a file, so that the run can say which rank failed first.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from ampatch.sweep.execution.directory import RunFiles
from ampatch.sweep.json_files import read_json, write_json
from ampatch.sweep.measure.run_record import Measured

_ENDING_FILE = "ending.json"
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?^\s*rank\s*: (?P<rank>\d+).*?^\s*exitcode\s*: (?P<code>-\d+)\b", re.S | re.M
)
"""Matches the rank that failed first in torchrun's report of a failure, if a signal killed it."""


# In the sweep's process


def torchrun_arguments(processes: int, folder: Path) -> list[str]:
    """The arguments of torchrun, up to the name of the module that each rank runs."""
    to_files = ",".join(f"{rank}:3" for rank in range(1, processes))  # 3 means both streams
    return [
        *("torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={processes}", f"--log-dir={folder}"),
        *([f"--redirects={to_files}"] if to_files else []),
        "-m",
    ]


def with_rank_errors(measured: Measured | None, files: RunFiles) -> Measured:
    """What a failed trial measured, with the error of the rank that failed first.

    Also appends the output of the other ranks to the log.
    """
    measured = measured or Measured()
    measured.error = _first_error(files) or measured.error
    with files.log.open("ab") as log:
        for path in sorted(files.ranks.glob("*/attempt_*/*/std*.log")):
            if path.stat().st_size:
                log.write(f"\n--- rank {path.parent.name}, {path.stem}:\n".encode())
                log.write(path.read_bytes())
    return measured


def _first_error(files: RunFiles) -> str:
    """The error of the rank that failed first; "" if no rank wrote one.

    A rank that is killed by a signal writes no error, and the other ranks then report a lost
    connection.  torchrun's log names the killed rank as the root cause.
    """
    cause = _ROOT_CAUSE.search(files.log.read_text(encoding="utf-8", errors="replace"))
    if cause is not None and int(cause["code"]) != -signal.SIGTERM:
        name = signal.Signals(-int(cause["code"])).name
        return f"rank {cause['rank']}: killed by {name}"
    errors = []
    for path in files.ranks.glob(f"*/attempt_*/*/{_ENDING_FILE}"):
        ending = read_json(path)
        if ending["error"]:
            errors.append((ending["time"], f"rank {path.parent.name}: {ending['error']}"))
    return min(errors)[1] if errors else ""


# In a rank


def write_ending(error: str) -> None:
    """Write how this rank ended, beside torchrun's error file for the rank."""
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(_ENDING_FILE)
    write_json(path, {"error": error, "time": time.time()})
