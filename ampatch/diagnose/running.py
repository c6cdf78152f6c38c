"""Run a script under a watch, up to a number of optimizer steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import ampatch
from ampatch.launch.script import Ending, check_script, run_script
from ampatch.session.session import registry

__all__ = ["check_script", "run_watched"]


class Enough(SystemExit):
    """Raised in the script when it has taken its steps; it ends like one that is done."""

    def __init__(self) -> None:
        super().__init__(0)


class StepLimit:
    """Counts steps, skipped ones too, of the optimizer that takes most; at `limit` the script ends."""

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
        """The step of a managed optimizer is over, taken or not."""
        self._count(optimizer)

    def _stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if registry.session_of(optimizer) is None:
            self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if self.steps == self._limit:
            raise Enough


@contextlib.contextmanager
def counting(limit: int | None) -> Iterator[StepLimit]:
    """A `StepLimit` for the block."""
    steps = StepLimit(limit)
    try:
        yield steps
    finally:
        steps.remove()


def run_watched(
    script: str, arguments: Sequence[str], steps: int | None = None
) -> tuple[Ending, int]:
    """Run `script`, ended after `steps` optimizer steps; returns how it ended and the steps taken.

    What it prints goes to the standard error, so that the answer alone is on the
    standard output.
    """
    with counting(steps) as counted, contextlib.redirect_stdout(sys.stderr):
        ending = run_script(script, arguments)
    return ending, counted.steps
