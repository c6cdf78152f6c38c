"""Hooks on the steps of all optimizers, also of those that `initialize` was not given.

An unmanaged optimizer that would update half weights is refused; every step is notified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...errors import AmpatchError

_HALF_TYPES = (torch.float16, torch.bfloat16)


def are_others(hooks: Any) -> bool:
    """Whether other code has hooks on all optimizers' steps too; True if that is unknown."""
    return bool(hooks) and (
        hooks is True
        or any(type(hook) not in (RefuseUnmanaged, NotifyOfSteps) for hook in hooks.values())
    )


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


class RefuseUnmanaged:
    """A hook before every step of a `torch.optim.Optimizer`, while it `keep`s watch.

    `wanting_masters()` gives ids of half weights that only optimizers with masters may
    update; an optimizer that is managed has none of them in its groups.
    """

    def __init__(self, wanting_masters: Callable[[], set[int]]) -> None:
        self._wanting_masters = wanting_masters
        self._handle: Any = None

    def keep(self, needed: bool) -> None:
        """Watch, or stop watching."""
        if needed and self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self)
        elif not needed and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        """Raise `AmpatchError` before a step that would train in pure half."""
        halves = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if param.dtype in _HALF_TYPES and param.requires_grad
        ]
        if halves and not self._wanting_masters().isdisjoint(map(id, halves)):
            raise AmpatchError(
                f"{type(optimizer).__name__}.step(): it would update half weights of a model that "
                "ampatch.initialize was given at an opt level with master weights, but without "
                "this optimizer: training in pure half. Nothing was changed. Call "
                "model, optimizer = ampatch.initialize(model, optimizer, ...) with it, now or in "
                'the first place; or ask for pure half with opt_level="O3".'
            )
