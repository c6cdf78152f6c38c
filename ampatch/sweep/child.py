"""One run of a sweep, in its own process: `python -m ampatch.sweep.child RECORD ORDER SCRIPT ...`.

Runs the script under a recorder and leaves what was measured in RECORD, also
when the script crashes, calls `sys.exit` or is told to end (SIGTERM).  While it
runs, RECORD.progress says how far it is.  The exit code is the script's.  ORDER
is an `Order`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import ampatch
from ampatch.config import environment
from ampatch.launch import children
from ampatch.launch.script import describe, run_script
from ampatch.sweep import plain_engine
from ampatch.sweep.autocast_engine import AutocastEngine
from ampatch.sweep.order import Order
from ampatch.sweep.record import Measured, write_json
from ampatch.sweep.recorder import Recorder

_GUARD = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SIGKILL will follow, from whoever is left
if os.fork():
    os._exit(0)  # nobody's child: the script may wait for all of its own
os.read(0, 1)
os.killpg(os.getpgrp(), signal.SIGKILL)
"""


def progress_path(record: Path) -> Path:
    return record.with_suffix(".progress")


def main(argv: Sequence[str]) -> int:
    record, text, script, *arguments = argv
    order = Order.from_text(text)
    path = Path(record).resolve()  # the script may change the directory
    _end_with_parent(order.guard)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    progress = progress_path(path)
    recorder = Recorder(
        lambda steps, loss: write_json(progress, {"steps": steps, "loss": loss}),
        steps=order.steps,
        output=sys.stdout.fileno() if order.mark_output else None,
    )
    _start_engine(order, recorder)
    if order.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    seed_everything(order.seed)
    ending = run_script(script, arguments)
    measured = _measured(recorder)
    measured.error = ending.error or measured.error
    write_json(path, measured)
    return ending.exit_code


def _start_engine(order: Order, recorder: Recorder) -> None:
    """Set up what the case asks for, and have the recorder told of what happens."""
    if order.autocast:  # before an apex package is made of what is there
        AutocastEngine(getattr(torch, order.autocast), recorder).install()
    children.start(order.auto)
    if order.auto:
        plain_engine.watch(recorder, environment.read())
    else:
        ampatch.observe(recorder)


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), `random` and, where torch brought it along, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _measured(recorder: Recorder) -> Measured:
    try:
        return recorder.measured()
    except RuntimeError as error:  # a device that has failed gives nothing back any more
        return Measured(error=describe(error))


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _end_with_parent(pipe: int | None) -> None:
    """Have this process and its own children killed once the sweep has ended.

    A process in our group waits for the pipe to close.  A thread of ours would
    not do: C code may hold the interpreter's lock for as long as it likes.
    """
    if pipe is None:
        return
    subprocess.run([sys.executable, "-I", "-S", "-c", _GUARD], stdin=pipe, check=True)
    os.close(pipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
