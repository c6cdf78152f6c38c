"""The threads in which torch runs the backward passes of accelerators, one for each device."""

from __future__ import annotations

import torch
from torch.autograd import Variable

from . import devices


def wait_until_idle() -> None:
    """Return once these threads have dropped all they held for the passes so far.

    A thread drops the objects of a pass after the pass has returned, and asks for the
    interpreter's lock to do so.  Before Python 3.14 a process that ends at this moment is
    aborted ("terminate called without an active exception").
    """
    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        return
    for device in devices.used():
        try:
            one = torch.ones((), device=device, requires_grad=True)
            # Not `one.backward()`, which would give the thread a Python object to drop.
            engine.run_backward((one,), (torch.ones_like(one),), False, False, (), True, True)
        except RuntimeError:  # a device that has failed, or is full, runs nothing more
            continue
