"""The native part: a C++ extension that runs hot code in fewer calls, with the same bits.

ampatch is complete without it.  `ampatch build`, and `ampatch run` and `ampatch sweep` before their
first trial, compile it.  `import ampatch` loads a build that matches and compiles nothing.
`part` is the loaded module, or None; `status()` says which, and why.  Each C++ function has a twin
in Python.  Both name each other ("In C++: ...", "In Python: ...").

A leaf: it imports the environment, the log and torch.  Where to look first:

* which build matches, where it lies, and the message when there is none: `loading`;
* what a build needs, and how it is compiled: `building`, and in its own process `in_child`.

The functions are in the headers, by topic; `native.cpp` lists them.
"""

from __future__ import annotations

import logging

from ..log import LOG_ONCE, logger
from .loading import Status, load

__all__ = ["Status", "log_build_hint", "missing", "part", "record_failure", "status"]

part, _status = load()

SPEEDUP = "1.15"
"""The speedup of a step of a small model at O1 on a CPU.  A test compares it with a measurement."""


def status() -> Status:
    """Whether the native part is active in this process, and why."""
    return _status


def record_failure(reason: str) -> None:
    """Record why a build failed in this process, for `status()`."""
    global _status
    _status = Status(False, f"not built: {reason}")


def missing() -> str | None:
    """Return what `ampatch build` lacks here, and how to get it, or None if nothing is missing."""
    from . import building

    return building.missing() if _status.is_to_build else None


def log_build_hint() -> None:
    """Log one line, once per process, if there is no build and could be one.  Starts no process."""
    if not _status.is_to_build or not logger.isEnabledFor(logging.INFO):
        return
    if missing() is None:
        logger.info(
            "ampatch runs in Python. Its native part makes small steps at O1 about %s times as "
            "fast, with the same results: python -m ampatch build, once, takes half a minute.",
            SPEEDUP,
            extra=LOG_ONCE,
        )
