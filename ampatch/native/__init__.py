"""The native part: one C++ file that does hot work in fewer calls, with the same bits.

ampatch is whole without it.  `ampatch build` compiles it; `import ampatch` loads a build that
matches, and nothing is ever built in silence.  `part` is the loaded module, or None; `status()`
says which, and why.  Code that can use it reads `part` and keeps its way in Python beside it.

A leaf: it knows the environment, the log and torch.  Where to look first:

* which build matches, where it lies, and what is said when there is none: `loading`;
* how it is compiled: `building`, and in a process of its own `in_child`.

The functions are in `native.cpp`.
"""

from __future__ import annotations

from .loading import Status, load

__all__ = ["Status", "part", "status"]

part, _status = load()


def status() -> Status:
    """Whether the native part is in force in this process, and why."""
    return _status
