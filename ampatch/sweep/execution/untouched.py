"""Ends a script that trains without `initialize` at its first step: its training is no trial."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

import ampatch


class StepWithoutInitialize(SystemExit):
    """Raised in the script in front of its first optimizer step; its exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class _Untouched:
    """Waits for an `initialize`, or for an optimizer step that comes before any."""

    def __init__(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._stop)
        self._stop_observing = ampatch.observe(self)

    def on_initialize(self, properties: Any) -> None:
        self._hook.remove()
        self._stop_observing()

    def _stop(self, *_: Any) -> None:
        raise StepWithoutInitialize


def stop_untouched() -> None:
    """End the script, with exit code 0, where it steps an optimizer before `initialize`."""
    _Untouched()
