"""One trial of a sweep, in a process of its own.

    python -m ampatch.sweep.execution.child RECORD OPTIONS SCRIPT [ARGUMENTS]

Runs the script under a recorder and writes what was measured to RECORD, also
when the script crashes, calls `sys.exit` or receives SIGTERM.  While it runs,
RECORD.progress holds the number of steps and the loss.  The exit code is the
script's.  OPTIONS is the text of a `ChildOptions`.  Under torchrun only rank 0 records.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import ampatch
from ampatch.config import environment
from ampatch.integrations import brought_in
from ampatch.launch import children
from ampatch.launch.program import Program
from ampatch.launch.script import describe
from ampatch.sweep.execution import ranks
from ampatch.sweep.execution.autocast_baseline import AutocastBaseline
from ampatch.sweep.execution.autocast_off import AutocastOff
from ampatch.sweep.execution.child_options import ChildOptions
from ampatch.sweep.execution.plain_training import PlainTraining, watch_automatic
from ampatch.sweep.execution.recognition import Recognition
from ampatch.sweep.execution.seeding import OwnSeeds, seed_everything
from ampatch.sweep.execution.untouched import stop_untouched
from ampatch.sweep.json_files import write_json
from ampatch.sweep.kinds import FRAMEWORK, UNKNOWN, Kind
from ampatch.sweep.measure.record import Measured
from ampatch.sweep.measure.recorder import Recorder
from ampatch.sweep.measure.written_files import WrittenFiles
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
    engine = _Engine(options, path, silent=rank > 0)
    engine.start()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    seed_everything(options.seed)
    own_seeds = OwnSeeds(options.seed, options.override_seeds, options.ranked)
    own_seeds.watch()
    written = WrittenFiles([Path.cwd(), Path(script).parent], [path.parent, path.parent.parent])
    trial_record = None if rank else _Record(path, engine, own_seeds, written)
    ending = Program(script, options.module).run(arguments)
    if options.ranked:
        ranks.leave_word(ending.error)
    if trial_record is not None:
        trial_record.write(ending.error)
    backward_threads.wait_until_idle()  # or the end of this process may be an abort
    return ending.exit_code


class _Record:
    """The file of what was measured, written at the script's end.

    Then Python waits for the script's threads and calls its exit handlers.  What these train or
    log is added: the exit handler of this class comes last, because it was there first.
    """

    def __init__(
        self,
        path: Path,
        engine: _Engine,
        own_seeds: OwnSeeds,
        written: WrittenFiles,
    ) -> None:
        self._path = path
        self._engine = engine
        self._recorder = engine.recorder
        self._own_seeds = own_seeds
        self._written = written
        self._error = ""
        self._notices: int | None = None  # those that are in the file
        self._process = os.getpid()
        atexit.register(self._complete)

    def write(self, error: str) -> None:
        """Write it; `error` is that of the exception that ended the script.

        Not in a copy of the process, made by os.fork, which has a part of the training.
        """
        if os.getpid() != self._process:
            return
        self._error, self._notices = error, self._recorder.notices
        measured = _measured(self._recorder)
        measured.error = error or measured.error
        measured.seed_calls = self._own_seeds.calls
        measured.seed_read = self._own_seeds.seed_read
        measured.autocast_off = self._engine.off.places
        measured.kind = self._engine.kind()
        measured.files_written = self._written.names()
        write_json(self._path, measured)

    def _complete(self) -> None:
        if self._notices not in (None, self._recorder.notices):
            self.write(self._error)
            backward_threads.wait_until_idle()


class _Engine:
    """What the options ask for: an opt level of ampatch, autocast, or the script as it is.

    `silent`: of ranks but the first, which report nothing.
    """

    def __init__(self, options: ChildOptions, path: Path, silent: bool) -> None:
        self._options = options
        self._progress = None if silent else progress_path(path)
        self.off = AutocastOff()
        self.recorder = Recorder(
            self._report,
            steps=options.steps,
            output=sys.stdout.fileno() if options.mark_output and not silent else None,
        )
        self._recognition: Recognition | None = None

    def kind(self) -> Kind:
        """The kind of the script, where this run recognizes it."""
        return UNKNOWN if self._recognition is None else self._recognition.kind

    def start(self) -> None:
        """Set up what the options ask for, and connect the recorder."""
        options, level = self._options, environment.read().opt_level
        if options.autocast:  # before an apex package copies the public functions
            AutocastBaseline(getattr(torch, options.autocast), self.recorder).install()
        if options.as_it_is:
            children.start(False)
            plain = PlainTraining(self.recorder, "autocast")
            plain.start()
            brought_in.tell_losses(plain.inside)
            return
        automatic = Kind(options.kind).is_plain and level != "O0"
        if level == "O0" or Kind(options.kind).is_foreign:
            self.off.install()
        children.start(automatic)
        if automatic:
            self.off.cover_switches()
        if level == "O0":
            self._recognition = Recognition(self.recorder, self.off)
            self._recognition.start()
        elif automatic:
            watch_automatic(self.recorder, environment.read())
        else:
            ampatch.observe(self.recorder)
            if options.kind == FRAMEWORK:
                brought_in.bring_in(options.framework)
            stop_untouched()

    def _report(self, steps: int, loss: float | None) -> None:
        if self._progress is not None:
            kind = self.kind().to_json()
            write_json(self._progress, {"steps": steps, "loss": loss, "kind": kind})


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
