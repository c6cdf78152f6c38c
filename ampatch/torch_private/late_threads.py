"""Threads of torch that drop Python objects late: of backward passes, and of process groups.

A thread asks for the interpreter's lock to do so.  Before Python 3.14 a process that ends at this
moment is aborted ("terminate called without an active exception").
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch.autograd import Variable

LONG_ENOUGH = 0.1  # seconds


def let_groups_finish() -> None:
    """Release the interpreter's lock, so that gloo's thread drops the last collective.

    The thread does so at once, but does not report it.  A plain script of two ranks whose forward
    calls `all_reduce` was aborted in 9 of 70 runs on a busy machine, in none of 90 with half of
    this wait (torch 2.13, 2026-11-24).
    """
    time.sleep(LONG_ENOUGH)


def wait_until_idle(devices: Iterable[torch.device]) -> None:
    """Return once the threads of these accelerators hold nothing of the backward passes so far."""
    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        return
    for device in devices:
        try:
            scalar = torch.ones((), device=device, requires_grad=True)
            # Not `scalar.backward()`, which would give the thread a Python object to drop.
            engine.run_backward((scalar,), (torch.ones_like(scalar),), False, False, (), True, True)
        except RuntimeError:  # a device that has failed, or is full, runs nothing more
            continue
