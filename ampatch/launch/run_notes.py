"""Lines that commands print about the script that they run.

At `initialize`: which of the script's arguments are replaced by options of the command.  At the
end: that the script never called `initialize`, so that nothing ran in mixed precision, or that it
made no step.
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

_MIGRATION_PAGE = "https://github.com/ampatch/ampatch/blob/main/docs/tutorials/from_torch_amp.md"
_AMP_OF_TORCH = re.compile(r"\bautocast\b|\bGradScaler\b")


class RunNotes:
    """Observer of the sessions of a script that `command` runs.

    `options`: the options of the command that replace arguments of `initialize`.
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
            os.register_at_fork(before=self.record_child)  # recorded in the parent and the child

    def on_initialize(self, properties: Any) -> None:
        """Record that the script has called `initialize`."""
        self._is_initialized = True
        self._has_optimizer |= any(session.optimizers for session in open_sessions())

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """Record that a managed optimizer has made or skipped a step."""
        self._has_stepped = True

    def on_close(self, session: Any) -> None:
        """Record that there was a session, which `ampatch.init` may have opened."""
        self._is_initialized = True

    def on_replaced(self, replaced: dict[str, tuple[Any, Any]]) -> None:
        """Print the arguments that the environment has replaced: `{name: (script's, new)}`."""
        changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in replaced.items())
        self._print_once(
            f"ampatch: replaced settings of the script: {changes.replace('torch.', '')}"
        )

    def record_child(self) -> None:
        """Record that the script has spawned or forked a process, which may do the training."""
        self._has_children = True

    def close(self) -> None:
        """Stop observing."""
        self._stop_observing()

    def print_if_unused(self) -> bool:
        """Print a line if the script never called `initialize`.  To be called at its end.

        Returns True if the line was printed and there were options, which changed nothing.
        """
        if self._is_auto or self._is_initialized or self._has_children or open_sessions():
            return False
        unused = f", and {', '.join(self._options)} changed nothing" if self._options else ""
        remedy = f"For mixed precision without editing it: {self._command} --auto {self._program}"
        if self._has_amp_of_torch():
            remedy = (
                f"It has torch's autocast or GradScaler: ampatch sweep {self._program} compares "
                f"these with ampatch, and {_MIGRATION_PAGE} shows how to replace them."
            )
        self._print_once(
            f"ampatch: {self._program} never called ampatch.initialize: it ran as it is{unused}. "
            f"{remedy}"
        )
        return bool(self._options)

    def print_if_no_step(self) -> None:
        """Print a line if the script made no step but should have.  To be called at its end."""
        should_train = self._has_optimizer or (self._is_auto and open_sessions())
        if should_train and not (self._has_stepped or self._has_children):
            self._print_once(
                f"ampatch: {self._program}: no optimizer step was seen. If it should train, look "
                "for errors that it catches."
            )

    def _has_amp_of_torch(self) -> bool:
        """Whether the script or a module in its folder names torch's autocast or GradScaler."""
        names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        files = {Path(file) for file in names if isinstance(file, str) and file.endswith(".py")}
        beside = self._program.file().absolute().parent
        own = (file.read_text(errors="replace") for file in files if file.parent == beside)
        return any(map(_AMP_OF_TORCH.search, own))

    def _print_once(self, line: str) -> None:
        if line not in self._printed and os.environ.get("RANK", "0") == "0":
            self._printed.add(line)
            print(line, file=sys.stderr, flush=True)
