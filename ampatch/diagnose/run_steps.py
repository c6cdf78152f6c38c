"""Run a script up to a number of optimizer steps, for the commands that watch it."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
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


class StepCallback:
    """Calls `callback(optimizer)` after each step of any optimizer, also after a skipped one."""

    def __init__(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._stop_observing = ampatch.observe(self)

    def remove(self) -> None:
        self._hook.remove()
        self._stop_observing()

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """Call back for a managed optimizer: torch calls no hook for a skipped step."""
        self._callback(optimizer)

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if session_of(optimizer) is None:
            self._callback(optimizer)


class EndAtFinding:
    """Ends the script when `debugger` has a report, after the step or before the next forward.

    Until then the backward pass adds the names of parameters to the report.
    """

    def __init__(self, debugger: Debugger) -> None:
        self._debugger = debugger
        self._steps = StepCallback(self._end)
        self._hook = register_module_forward_pre_hook(self._before_forward)

    def remove(self) -> None:
        self._hook.remove()
        self._steps.remove()

    def _before_forward(self, module: nn.Module, args: tuple) -> None:
        is_outermost = len(self._debugger.running) <= 1
        if is_outermost and current_backward_pass() == -1:  # no recompute in a backward pass
            self._end()

    def _end(self, optimizer: Any = None) -> None:
        if self._debugger.report is not None:
            raise SystemExit(1)


def run_steps(
    program: Program, arguments: Sequence[str], steps: int | None = None
) -> tuple[Ending, int]:
    """Run `program` for up to `steps` optimizer steps; returns how it ended and the number of
    steps.

    The script's output goes to the standard error, so that the standard output has only the
    command's result.
    """
    steps_by_optimizer: Counter[int] = Counter()  # by the optimizer's id

    def count(optimizer: Any) -> None:
        steps_by_optimizer[id(optimizer)] += 1
        if steps_by_optimizer[id(optimizer)] == steps:
            raise EnoughSteps

    step_counter = StepCallback(count)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            ending = program.run(arguments)
    finally:
        step_counter.remove()
    return ending, max(steps_by_optimizer.values(), default=0)
