"""Objects that are told what happens in the sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor


class Observers:
    """Calls the method of each observer that is named after an event.

    `are_there` is a plain attribute: a training step asks it before it makes what an event needs.
    """

    def __init__(self) -> None:
        self._observers: list[Any] = []
        self.are_there = False

    def __len__(self) -> int:
        return len(self._observers)

    def add(self, observer: Any) -> Callable[[], None]:
        """Notify `observer` from now on; returns the function that ends it."""
        self._observers.append(observer)
        self.are_there = True
        return lambda: self._remove(observer)

    def _remove(self, observer: Any) -> None:
        if observer in self._observers:
            self._observers.remove(observer)
        self.are_there = bool(self._observers)

    def notify(self, event: str, *values: Any) -> None:
        """Call the method `event(*values)` of the observers that have it."""
        for observer in list(self._observers):  # some leave when they are notified
            method = getattr(observer, event, None)
            if method is not None:
                method(*values)

    @contextlib.contextmanager
    def around(self, block: AbstractContextManager[Tensor], loss_id: int) -> Iterator[Tensor]:
        """A `scale_loss` block; tells when its backward pass and when it has ended."""
        with block as loss:
            yield loss
            self.notify("on_backward", loss_id)
        self.notify("on_unscaled", loss_id)
