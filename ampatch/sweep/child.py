"""One run of a sweep, in its own process: `python -m ampatch.sweep.child RECORD SCRIPT ...`.

Runs the script under a recorder and leaves what was measured in RECORD, also
when the script crashes, calls `sys.exit` or is told to end (SIGTERM).  While it
runs, RECORD.progress says how far it is.  The exit code is the script's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import ampatch
from ampatch.sweep.record import Measured, write_json
from ampatch.sweep.recorder import Recorder
from ampatch.run.script import describe, run_script


def progress_path(record: Path) -> Path:
    return record.with_suffix(".progress")


def main(argv: Sequence[str]) -> int:
    record, script, *arguments = argv
    path = Path(record).resolve()  # the script may change the directory
    _end_with_parent()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    progress = progress_path(path)
    recorder = Recorder(lambda steps, loss: write_json(progress, {"steps": steps, "loss": loss}))
    ampatch.observe(recorder)
    ending = run_script(script, arguments)
    measured = _measured(recorder)
    measured.error = ending.error or measured.error
    write_json(path, measured)
    return ending.exit_code


def _measured(recorder: Recorder) -> Measured:
    try:
        return recorder.measured()
    except RuntimeError as error:  # a device that has failed gives nothing back any more
        return Measured(error=describe(error))


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _end_with_parent() -> None:
    """End this process and its own children when the sweep is killed."""
    if not hasattr(os, "getpgrp") or os.getpgrp() != os.getpid():
        return  # not started by a sweep: there is a group that is not ours to end
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="ampatch-sweep-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
