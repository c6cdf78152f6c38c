"""Observers: objects that are notified of events in the sessions (`api.observe` lists them)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..scaling.scale_loss_block import refuse_attribute


class Observers:
    """Calls the method of each observer that has the name of an event.

    `registered` is a plain attribute: a training step reads it before it computes an event's
    arguments.
    """

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def add(self, observer: Any) -> Callable[[], None]:
        """Notify `observer` from now on.  Returns a function that removes it."""
        self.registered.append(observer)
        return lambda: self.registered.remove(observer) if observer in self.registered else None

    def notify(self, event: str, *values: Any) -> None:
        """Call `observer.event(*values)` for each observer that has this method."""
        for observer in list(self.registered):  # a method may remove its observer
            method = getattr(observer, event, None)
            if method is not None:
                method(*values)

    def around(self, block: AbstractContextManager[Tensor], loss_id: int) -> ObservedBlock:
        """Wrap a `scale_loss` block: it notifies after its backward pass and at its end."""
        return ObservedBlock(block, self, loss_id)


class ObservedBlock:
    """Context manager: a `scale_loss` block that notifies observers."""

    def __init__(
        self, block: AbstractContextManager[Tensor], observers: Observers, loss_id: int
    ) -> None:
        self._block = block
        self._observers = observers
        self._loss_id = loss_id

    def __enter__(self) -> Tensor:
        return self._block.__enter__()

    def __exit__(self, exc_type: type[BaseException] | None, *details: Any) -> None:
        if exc_type is not None:
            self._block.__exit__(exc_type, *details)
            return
        with contextlib.ExitStack() as stack:
            stack.push(self._block)  # an observer's exception counts as raised inside the block
            self._observers.notify("on_backward", self._loss_id)
        self._observers.notify("on_unscaled", self._loss_id)

    __getattr__ = refuse_attribute
