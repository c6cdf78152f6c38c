"""Gradients that a `scale_loss` block left scaled in an optimizer that it was not given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..log import logger

Seen = dict[int, tuple[int, int]]


class LeftScaled:
    """Whether one optimizer holds such gradients; `leaves` gives where autograd leaves them."""

    def __init__(self, optimizer: Any, leaves: Callable[[], Iterable[Tensor]]) -> None:
        self._name = type(optimizer).__name__
        self._leaves = leaves
        self._known = False

    def __bool__(self) -> bool:
        return self._known

    def seen(self) -> Seen:
        """Which gradients backward has left, and their versions, to tell later what it changed."""
        return {
            id(leaf): (id(leaf.grad), leaf.grad._version)
            for leaf in self._leaves()
            if leaf.grad is not None
        }

    def note(self, before: Seen) -> None:
        """A block that the optimizer was not given to has ended; `before` is what was `seen`."""
        if self.seen() != before:
            self._known = True

    def report(self) -> None:
        """Say so if such gradients are about to be used."""
        if self._known and self.seen():
            logger.error(
                "%s: gradients are used that an ampatch.scale_loss block left scaled, because it "
                "was not given this optimizer. Pass every optimizer the loss reaches, "
                "scale_loss(loss, [first, second]), or zero_grad() this one before its own block.",
                self._name,
            )
        self._known = False

    def forget(self) -> None:
        """The gradients were zeroed."""
        self._known = False
