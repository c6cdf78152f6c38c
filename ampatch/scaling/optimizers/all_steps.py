"""A hook on the steps of all optimizers, also of those that `initialize` was not given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class NotifyOfSteps:
    """A hook after every step of a `torch.optim.Optimizer`, while it `keep`s watch."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._handle: Any = None

    def keep(self, needed: bool) -> None:
        """Watch, or stop watching."""
        if needed and self._handle is None:
            self._handle = register_optimizer_step_post_hook(self)
        elif not needed and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._notify()
