"""A trial of several processes, started by torchrun (`--nproc-per-node`).

Rank 0 records.  The other ranks run the script in the same environment; torchrun writes
what they print to files, and when the trial fails these go to the end of its log.  Each
rank leaves a word on how it ended, so that the run can say which rank failed first.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from ampatch.sweep.execution.directory import RunFiles
from ampatch.sweep.json_files import read_json, write_json
from ampatch.sweep.measure.record import Measured

_ENDING = "ending.json"
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?^\s*rank\s*: (?P<rank>\d+).*?^\s*exitcode\s*: (?P<code>-\d+)\b", re.S | re.M
)
"""In torchrun's report of a failure: the rank that failed first, where a signal killed it."""


# In the sweep's process


def launcher(processes: int, folder: Path) -> list[str]:
    """The module torchrun with its options, up to the name of the module that each rank runs."""
    others = ",".join(f"{rank}:3" for rank in range(1, processes))  # 3: both streams to files
    return [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        f"--log-dir={folder}",
        *([f"--redirects={others}"] if others else []),
        "-m",
    ]


def explained(measured: Measured | None, files: RunFiles) -> Measured:
    """What a failed trial measured, with the error of the rank that failed first.

    Adds to the log what the ranks but the first have printed.
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
    """How the rank ended that failed first; "" if none says so.

    A rank that a signal has killed leaves no word, and the others then say that it does
    not answer; torchrun reports it in the log as the root cause.
    """
    cause = _ROOT_CAUSE.search(files.log.read_text(encoding="utf-8", errors="replace"))
    if cause is not None and int(cause["code"]) != -signal.SIGTERM:
        name = signal.Signals(-int(cause["code"])).name
        return f"rank {cause['rank']}: killed by {name}"
    words = []
    for path in files.ranks.glob(f"*/attempt_*/*/{_ENDING}"):
        word = read_json(path)
        if word["error"]:
            words.append((word["time"], f"rank {path.parent.name}: {word['error']}"))
    return min(words)[1] if words else ""


# In a rank


def this_rank() -> int:
    return int(os.environ["RANK"])


def open_guard(pipe: int) -> int:
    """The pipe `pipe` of the process that started this rank: torchrun passes no files on."""
    return os.open(f"/proc/{os.getppid()}/fd/{pipe}", os.O_RDONLY)


def leave_word(error: str) -> None:
    """Leave how this rank ended beside the file that torchrun has for its error."""
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(_ENDING)
    write_json(path, {"error": error, "time": time.time()})
