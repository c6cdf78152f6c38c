"""What commands say of a script that they run, besides what the script says: one line each.

At `initialize`: which arguments of the script their options replace.  At the end: that the
script never called `initialize`, so that nothing was in mixed precision.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ampatch
from ampatch.launch.program import Program
from ampatch.session.facade import open_sessions

_FROM_TORCH = "https://github.com/ampatch/ampatch/blob/main/docs/tutorials/from_torch_amp.md"
_AMP_OF_TORCH = re.compile(r"\bautocast\b|\bGradScaler\b")


class RunNotes:
    """Observer of the sessions of a script, which `command` runs.

    `given` are the options of the command that replace arguments of `initialize`.
    """

    def __init__(
        self, command: str, program: Program, given: Collection[str], is_auto: bool
    ) -> None:
        self._command = command
        self._program = program
        self._given = given
        self._is_auto = is_auto
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

    def say_unused(self) -> bool:
        """The script has ended well: say so if nothing in it can have been in mixed precision.

        Returns whether options were given that have changed nothing.
        """
        if self._is_auto or self._is_initialized or self._has_children or open_sessions():
            return False
        nothing = f", and {', '.join(self._given)} changed nothing" if self._given else ""
        remedy = f"For mixed precision without editing it: {self._command} --auto {self._program}"
        if self._has_amp_of_torch():
            remedy = (
                f"It has torch's autocast or GradScaler: ampatch sweep {self._program} compares "
                f"these with ampatch, and {_FROM_TORCH} shows how to replace them."
            )
        self._say(
            f"ampatch: {self._program} never called ampatch.initialize: it ran as it is{nothing}. "
            f"{remedy}"
        )
        return bool(self._given)

    def _has_amp_of_torch(self) -> bool:
        """Whether the script, or a module beside it, names torch's autocast or GradScaler."""
        found = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        files = {Path(file) for file in found if isinstance(file, str) and file.endswith(".py")}
        beside = self._program.file().absolute().parent
        own = (file.read_text(errors="replace") for file in files if file.parent == beside)
        return any(map(_AMP_OF_TORCH.search, own))

    def _say(self, line: str) -> None:
        if line not in self._said and os.environ.get("RANK", "0") == "0":
            self._said.add(line)
            print(line, file=sys.stderr, flush=True)
