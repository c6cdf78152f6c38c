"""One trial of a sweep, in a process of its own.

    python -m ampatch.sweep.execution.child RECORD OPTIONS SCRIPT [ARGUMENTS]

Runs the script under a recorder and writes what was measured to RECORD, also
when the script crashes, calls `sys.exit` or receives SIGTERM.  While it runs,
RECORD.progress holds the number of steps and the loss.  The exit code is the
script's.  OPTIONS is the text of a `ChildOptions`.  Under torchrun only rank 0 records.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import ampatch
from ampatch.config import environment
from ampatch.launch import children
from ampatch.launch.script import describe, run_script
from ampatch.sweep.execution import ranks, script_without_amp
from ampatch.sweep.execution.autocast_baseline import AutocastBaseline
from ampatch.sweep.execution.child_options import ChildOptions
from ampatch.sweep.execution.seeding import OwnSeeds, seed_everything
from ampatch.sweep.execution.untouched import stop_untouched
from ampatch.sweep.json_files import write_json
from ampatch.sweep.measure.record import Measured
from ampatch.sweep.measure.recorder import Recorder
from ampatch.torch_private import backward_threads

_GUARD = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the sweep, or this process, sends SIGKILL next
if os.fork():
    os._exit(0)  # no longer a child of the script's process, which may wait for all of its own
os.read(0, 1)
os.killpg(os.getpgrp(), signal.SIGKILL)
"""


def progress_path(record: Path) -> Path:
    return record.with_suffix(".progress")


def main(argv: Sequence[str]) -> int:
    record, text, script, *arguments = argv
    options = ChildOptions.from_text(text)
    path = Path(record).resolve()  # the script may change the directory
    rank = ranks.this_rank() if options.ranked else 0
    _end_with_parent(_guard(options))
    signal.signal(signal.SIGTERM, _exit_on_signal)
    recorder = Recorder(
        _ignore if rank else _to_file(progress_path(path)),
        steps=options.steps,
        output=sys.stdout.fileno() if options.mark_output and not rank else None,
    )
    _start_engine(options, recorder)
    if options.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    seed_everything(options.seed)
    own_seeds = OwnSeeds(options.seed, options.override_seeds)
    own_seeds.watch()
    ending = run_script(script, arguments)
    if options.ranked:
        ranks.leave_word(ending.error)
    if not rank:
        measured = _measured(recorder)
        measured.error = ending.error or measured.error
        measured.seed_calls, measured.seed_read = own_seeds.calls, own_seeds.seed_read
        write_json(path, measured)
    backward_threads.wait_until_idle()  # or the end of this process may be an abort
    return ending.exit_code


def _to_file(progress: Path) -> Callable[[int, float | None], None]:
    return lambda steps, loss: write_json(progress, {"steps": steps, "loss": loss})


def _ignore(steps: int, loss: float | None) -> None:
    """For ranks but the first, which report nothing."""


def _start_engine(options: ChildOptions, recorder: Recorder) -> None:
    """Set up what the case asks for, and connect the recorder."""
    if options.autocast:  # before an apex package copies the public functions
        AutocastBaseline(getattr(torch, options.autocast), recorder).install()
    children.start(options.auto)
    if options.auto:
        script_without_amp.watch(recorder, environment.read())
    else:
        ampatch.observe(recorder)
        stop_untouched()


def _measured(recorder: Recorder) -> Measured:
    try:
        return recorder.measured()
    except RuntimeError as error:  # a device that has failed returns no more values
        return Measured(error=describe(error))


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _guard(options: ChildOptions) -> int | None:
    if options.guard is None or not options.ranked:
        return options.guard
    return ranks.open_guard(options.guard)


def _end_with_parent(pipe: int | None) -> None:
    """Have this process and its children killed when the sweep's process has ended.

    Another process of the same group waits for the pipe to close.  A thread cannot do
    that: C code may hold the interpreter's lock for any time.
    """
    if pipe is None:
        return
    subprocess.run([sys.executable, "-I", "-S", "-c", _GUARD], stdin=pipe, check=True)
    os.close(pipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
