"""Run a script up to a number of optimizer steps, for the commands that watch it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampatch
from ampatch.launch.program import Program
from ampatch.launch.script import Ending, EnoughSteps
from ampatch.session.facade import session_of
from ampatch.torch_private.probes import current_backward_pass

from .nonfinite import Debugger


class StepLimit:
    """Ends the script after `limit` steps of one optimizer; skipped steps count."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._steps: dict[int, int] = {}
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._stop = ampatch.observe(self)

    @property
    def steps(self) -> int:
        return max(self._steps.values(), default=0)

    def remove(self) -> None:
        self._hook.remove()
        self._stop()

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """Called after each step of a managed optimizer, also after a skipped one."""
        self._count(optimizer)

    def _stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if session_of(optimizer) is None:
            self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if self.steps == self._limit:
            raise EnoughSteps


@contextlib.contextmanager
def counting(limit: int | None) -> Iterator[StepLimit]:
    """A `StepLimit` for the block."""
    steps = StepLimit(limit)
    try:
        yield steps
    finally:
        steps.remove()


class FoundEnough(SystemExit):
    """Raised in the script when what it was run for is found; its exit code is 1."""

    def __init__(self) -> None:
        super().__init__(1)


class EndAtFinding:
    """Ends the script when `debugger` has a report, after the step or before the next forward.

    Until then the backward pass adds the names of parameters to the report.
    """

    def __init__(self, debugger: Debugger) -> None:
        self._debugger = debugger
        self._handles = [
            register_optimizer_step_post_hook(self._stepped),
            register_module_forward_pre_hook(self._before_forward),
        ]
        self._stop = ampatch.observe(self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._stop()

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """Called after each step of a managed optimizer, also after a skipped one."""
        self._end()

    def _stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if session_of(optimizer) is None:
            self._end()

    def _before_forward(self, module: nn.Module, args: tuple) -> None:
        is_outermost = len(self._debugger.running) <= 1
        if is_outermost and current_backward_pass() == -1:  # not computed again in a backward
            self._end()

    def _end(self) -> None:
        if self._debugger.report is not None:
            raise FoundEnough


def run_watched(
    program: Program, arguments: Sequence[str], steps: int | None = None
) -> tuple[Ending, int]:
    """Run `program` for up to `steps` optimizer steps; returns its ending and the steps taken.

    The script's output goes to the standard error, so that the standard output holds only
    the answer of the command.
    """
    with counting(steps) as counted, contextlib.redirect_stdout(sys.stderr):
        ending = program.run(arguments)
    return ending, counted.steps
