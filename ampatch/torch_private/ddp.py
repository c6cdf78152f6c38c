"""What `DistributedDataParallel` keeps to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def add_comm_hook(wrapper: Any, state: Any, hook: Callable) -> bool:
    """Register a communication hook, unless there is one; whether it is registered.

    A wrapper takes one.  It lists those of scripts, for copies of itself and for compiled code,
    which have no use for this one.  Where this torch keeps no such list nothing is registered.
    """
    listed = getattr(wrapper, "_comm_hooks", None)
    if listed is None or listed:
        return False
    try:
        wrapper.register_comm_hook(state, hook)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        return False  # one of those built into torch, which are not listed
    finally:
        listed.clear()
    return True
