"""Scaled gradients that a `scale_loss` block left in an optimizer that it was not given.

A GAN does this on purpose and zeroes them.  A step on them, or a block that adds to them, logs an
error.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..log import logger
from .gradient_state import GradientState

Seen = tuple[list[Tensor | None], list[int]]

entering = threading.Lock()
"""Held while an optimizer's gradients are looked at for another optimizer's block, and while
a block of its own begins: its backward pass, in another thread, must not write them meanwhile.
"""

_grad_of = operator.attrgetter("grad")


class OtherBlocks:
    """What blocks for other optimizers do to the gradients of this one.

    `parameters` gives the tensors that have them; `left_scaled` says whether such a block has left
    scaled gradients there.
    """

    def __init__(
        self, optimizer: Any, state: GradientState, parameters: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._kind = type(optimizer).__name__
        self._state = state
        self._parameters = parameters
        self.left_scaled = False
        self.open_blocks = 0  # of others, with a loss scale
        self.own_blocks = 0  # that have begun

    def before(self) -> tuple[int, Seen] | None:
        """A block for another optimizer begins: what there is now, for `after`.

        None: this one is in a block of its own, in another thread.
        """
        with entering:
            if self._state.in_block:
                return None
            self.open_blocks += 1
            return self.own_blocks, self._seen()

    def after(self, before: tuple[int, Seen] | None) -> None:
        """That block has ended; `before` is what `before` gave.

        What a block of this optimizer's own has changed meanwhile is not counted.
        """
        if before is None:
            return
        blocks, (grads, versions) = before
        with entering:
            self.open_blocks -= 1
            if self._state.in_block or self.own_blocks != blocks:
                return
            grads_now, versions_now = self._seen()
            if versions != versions_now or not all(map(operator.is_, grads, grads_now)):
                self.left_scaled = True

    def report(self) -> None:
        """Log an error if such gradients are about to be used."""
        if self.left_scaled and any(grad is not None for grad in map(_grad_of, self._parameters())):
            logger.error(
                "%s: gradients are used that an ampatch.scale_loss block left scaled, because it "
                "was not given this optimizer. Pass every optimizer the loss reaches, "
                "scale_loss(loss, [first, second]), or zero_grad() this one before its own block.",
                self._kind,
            )
        self.left_scaled = False

    def _seen(self) -> Seen:
        """Gradients as backward has left them, and versions, to tell later what it changed."""
        grads = list(map(_grad_of, self._parameters()))
        return grads, [-1 if grad is None else grad._version for grad in grads]
