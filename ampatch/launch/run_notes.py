"""Lines that commands print about the script that they run.

At `initialize`: which arguments of the script options of the command replace.  At the end: that
the script never called `initialize`, so that nothing was in mixed precision, or never stepped.
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

    `options` are those of the command that replace arguments of `initialize`.
    """

    def __init__(
        self, command: str, program: Program, options: Collection[str], is_auto: bool
    ) -> None:
        self._command = command
        self._program = program
        self._options = options
        self._is_auto = is_auto
        self._is_initialized = self._has_optimizer = self._has_stepped = False
        self._has_children = False
        self._printed: set[str] = set()
        self._stop_observing = ampatch.observe(self)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(before=self.child_started)  # parent and child know of it

    def on_initialize(self, properties: Any) -> None:
        """The script called `initialize`."""
        self._is_initialized = True
        self._has_optimizer |= any(session.optimizers for session in open_sessions())

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """A managed optimizer has stepped, or skipped a step."""
        self._has_stepped = True

    def on_close(self, session: Any) -> None:
        """A session closes; `ampatch.init`, apex's oldest API, may have opened it."""
        self._is_initialized = True

    def on_replaced(self, replaced: dict[str, tuple[Any, Any]]) -> None:
        """`initialize` takes these from the environment: the script's value, and the active one."""
        changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in replaced.items())
        self._print_once(
            f"ampatch: replaced settings of the script: {changes.replace('torch.', '')}"
        )

    def child_started(self) -> None:
        """The script spawns or forks a process, which may do the training."""
        self._has_children = True

    def close(self) -> None:
        """Stop observing."""
        self._stop_observing()

    def say_unused(self) -> bool:
        """The script has ended without an error: say so if nothing in it was in mixed precision.

        Returns whether there were options, which then have changed nothing.
        """
        if self._is_auto or self._is_initialized or self._has_children or open_sessions():
            return False
        unused = f", and {', '.join(self._options)} changed nothing" if self._options else ""
        remedy = f"For mixed precision without editing it: {self._command} --auto {self._program}"
        if self._has_amp_of_torch():
            remedy = (
                f"It has torch's autocast or GradScaler: ampatch sweep {self._program} compares "
                f"these with ampatch, and {_FROM_TORCH} shows how to replace them."
            )
        self._print_once(
            f"ampatch: {self._program} never called ampatch.initialize: it ran as it is{unused}. "
            f"{remedy}"
        )
        return bool(self._options)

    def say_no_step(self) -> None:
        """The script has ended without an error: say so if it should have trained and did not."""
        should_train = self._has_optimizer or (self._is_auto and open_sessions())
        if should_train and not (self._has_stepped or self._has_children):
            self._print_once(
                f"ampatch: {self._program}: no optimizer step was seen. If it should train, look "
                "for errors that it catches."
            )

    def _has_amp_of_torch(self) -> bool:
        """Whether the script, or a module beside it, names torch's autocast or GradScaler."""
        names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        files = {Path(file) for file in names if isinstance(file, str) and file.endswith(".py")}
        beside = self._program.file().absolute().parent
        own = (file.read_text(errors="replace") for file in files if file.parent == beside)
        return any(map(_AMP_OF_TORCH.search, own))

    def _print_once(self, line: str) -> None:
        if line not in self._printed and os.environ.get("RANK", "0") == "0":
            self._printed.add(line)
            print(line, file=sys.stderr, flush=True)
