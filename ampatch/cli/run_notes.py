"""What `ampatch run` says of a script besides what the script says: one line each.

At `initialize`: which arguments of the script its options replace.  At the end: that the
script never called `initialize`, so that nothing was in mixed precision.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ampatch
from ampatch.session.facade import open_sessions


class RunNotes:
    """Observer of the sessions of a script; `script` is its name as the command line has it."""

    def __init__(self, script: str) -> None:
        self._script = script
        self._is_initialized = False
        self._has_children = False
        self._said: set[str] = set()
        self._stop = ampatch.observe(self)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(before=self.child_started)  # so that both know

    def on_initialize(self, properties: Any) -> None:
        """The script called `initialize`."""
        self._is_initialized = True

    def on_close(self, session: Any) -> None:
        """A session closes; `ampatch.init`, apex's oldest API, may have opened it."""
        self._is_initialized = True

    def on_replaced(self, replaced: dict[str, tuple[Any, Any]]) -> None:
        """`initialize` takes these from the environment: what the script gave, and what counts."""
        changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in replaced.items())
        self._say(
            f"ampatch: in force instead of what the script gives: {changes.replace('torch.', '')}"
        )

    def child_started(self) -> None:
        """The script spawns or forks a process, which may do the training."""
        self._has_children = True

    def close(self) -> None:
        """Stop looking."""
        self._stop()

    def say_unused(self) -> None:
        """The script has ended well: say so if nothing in it can have been in mixed precision."""
        if self._is_initialized or self._has_children or open_sessions():
            return
        self._say(
            f"ampatch: {self._script} never called ampatch.initialize: it ran as it is. For mixed "
            f"precision without editing it: ampatch run --auto {self._script}"
        )

    def _say(self, line: str) -> None:
        if line not in self._said and os.environ.get("RANK", "0") == "0":
            self._said.add(line)
            print(line, file=sys.stderr, flush=True)
