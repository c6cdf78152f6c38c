"""Gradients that a `scale_loss` block left scaled in an optimizer that it was not given."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..log import logger
from ..torch_private.half_grads import raw_grad

Seen = tuple[list[Tensor | None], list[int]]

entering = threading.Lock()
"""Held while an optimizer's gradients are looked at for a block that it was not given to, and while
a block of its own begins: its backward pass, in another thread, must not write them meanwhile.
"""

_grad_of = operator.attrgetter("grad")


class LeftScaled:
    """Whether one optimizer holds such gradients; `leaves` gives where autograd leaves them."""

    __slots__ = ("_leaves", "_name", "known")

    def __init__(self, optimizer: Any, leaves: Callable[[], Sequence[Tensor]]) -> None:
        self._name = type(optimizer).__name__
        self._leaves = leaves
        self.known = False

    def seen(self) -> Seen:
        """Gradients as backward has left them, and versions, to tell later what it changed."""
        grads = list(map(raw_grad, self._leaves()))
        return grads, [-1 if grad is None else grad._version for grad in grads]

    def note(self, before: Seen) -> None:
        """A block that the optimizer was not given to has ended; `before` is what was `seen`."""
        (grads, versions), (grads_now, versions_now) = before, self.seen()
        if versions != versions_now or not all(map(operator.is_, grads, grads_now)):
            self.known = True

    def report(self) -> None:
        """Say so if such gradients are about to be used."""
        if self.known and any(grad is not None for grad in map(_grad_of, self._leaves())):
            logger.error(
                "%s: gradients are used that an ampatch.scale_loss block left scaled, because it "
                "was not given this optimizer. Pass every optimizer the loss reaches, "
                "scale_loss(loss, [first, second]), or zero_grad() this one before its own block.",
                self._name,
            )
        self.known = False
