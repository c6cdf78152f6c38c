"""gloo at the end of a process."""

from __future__ import annotations

import atexit
import sys

import torch.distributed as dist


def end_gloo_at_exit() -> None:
    """Have gloo's threads end before the interpreter does, if there is a process group.

    A thread that asks for the interpreter's lock while it ends aborts the process ("terminate
    called without an active exception"): in about one run in 50, without ampatch too.  torchrun
    then reports a ChildFailedError, after all results have been written.
    """
    if dist.is_available() and dist.is_initialized():
        atexit.unregister(_end_group)  # so that it runs once
        atexit.register(_end_group)


def _end_group() -> None:
    failed = hasattr(sys, "last_type")  # other ranks may have ended, and would be waited for
    if dist.is_initialized() and dist.get_backend() == "gloo" and not failed:
        dist.destroy_process_group()
