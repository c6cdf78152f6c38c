"""The native part: one C++ file that does hot work in fewer calls, with the same bits.

ampatch is whole without it.  `ampatch build`, and `ampatch run` and `ampatch sweep` before their
first trial, compile it.  `import ampatch` loads a build that matches and compiles nothing.
`part` is the loaded module, or None; `status()` says which, and why.  Code that can use it reads
`part` and keeps its way in Python beside it.

A leaf: it knows the environment, the log and torch.  Where to look first:

* which build matches, where it lies, and what is said when there is none: `loading`;
* what it needs and how it is compiled: `building`, and in a process of its own `in_child`.

The functions are in the headers, by what they are for; `native.cpp` lists them.
"""

from __future__ import annotations

import logging

from ..log import ONCE, logger
from .loading import Status, load

__all__ = ["Status", "missing", "note_failure", "part", "say_what_a_build_gives", "status"]

part, _status = load()

GIVES = "1.19"
"""How many times as fast steps of small models are with it, O1 on a CPU: a test compares."""


def status() -> Status:
    """Whether the native part is in force in this process, and why."""
    return _status


def note_failure(reason: str) -> None:
    """A build was tried in this process: `status()` says why there is none."""
    global _status
    _status = Status(False, f"not built: {reason}")


def missing() -> str | None:
    """What keeps `ampatch build` from making it here, and how to get it; None if nothing does."""
    from . import building

    return building.missing() if _status.is_to_build else None


def say_what_a_build_gives() -> None:
    """One line in the log, once, where there is no build and could be one.  Starts no process."""
    if not _status.is_to_build or not logger.isEnabledFor(logging.INFO):
        return
    if missing() is None:
        logger.info(
            "ampatch runs in Python. Its native part makes small steps at O1 about %s times as "
            "fast, with the same results: python -m ampatch build, once, takes half a minute.",
            GIVES,
            extra=ONCE,
        )
