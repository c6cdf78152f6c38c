"""The gradients of one optimizer while a `scale_loss` block runs.

What is there is set aside, so that what backward adds can be told from it and
unscaled; then both are added up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import AmpatchError
from .gradient_state import GradientState, add_to
from .loss_scaler import Scaler
from .pending import Pending
from .process_group import world_size
from .scale_value import Flag
from .shared_parameters import Sharing

_grad_of = operator.attrgetter("grad")


class GradientFlow(GradientState):
    """Into a block, through the backward pass, and out of it."""

    def refuse_nesting(self) -> None:
        """Raise `AmpatchError` inside another `scale_loss` block for the same optimizer."""
        if self.in_block:
            raise AmpatchError(
                f"ampatch.scale_loss(..., <{type(self.optimizer).__name__}>): this optimizer is "
                "already in an enclosing scale_loss block. Leave that block first; the gradients "
                "of several blocks add up until the step."
            )

    def refuse_step_in_block(self) -> None:
        """Raise `AmpatchError` inside a `scale_loss` block: gradients are not unscaled yet."""
        if self.in_block:
            raise AmpatchError(
                f"{type(self.optimizer).__name__}.step() inside the ampatch.scale_loss block of this "
                "optimizer: its gradients are still scaled. Call step() after the block."
            )

    def gather(self, scaler: Scaler) -> list[Tensor]:
        """Before a backward pass of `scaler`'s: complete the gradients; returns whose there are.

        What is pending is unscaled, unless `scaler`, as it is now, may add to it.
        """
        if self.pending is not None and not self.pending.is_scaled_by(scaler):
            self.pending.finish()
        if self.left_scaled.known:
            self.left_scaled.report()
        self._fed = True
        if self.masters.by_half:
            unreduced = self.is_unreduced
            self.take_unscaled()
            self.is_unreduced = unreduced
        if self._overflow.spent is not None:
            self.check_spent()
        return [param for param in self.parameters() if param.grad is not None]

    def make_room(
        self, held: list[Tensor], pending: Callable[[], Pending], sharing: Sharing
    ) -> None:
        """Set the gradients that `gather` found aside, or scale them as those that come."""
        if not held:
            self._aside = []
            self._enter_block()
            self.is_unreduced = False
            self.pending = self._overflow.found = self._overflow.spent = None
            return
        owned = sharing.owned(self, held)
        alone = world_size() == 1
        own = owned if alone else []
        self._aside = [(param, param.grad) for param in own]
        self._enter_block()  # from here on there is something to put back
        if not alone:
            self._put_back_scaled(owned, pending())
        for param in own:  # what backward adds must be told from what was there
            param.grad = None

    def _put_back_scaled(self, owned: list[Tensor], pending: Pending) -> None:
        """Leave earlier gradients where backward adds to them, so one all-reduce serves both.

        Those of masters stay there in FP32, unless DDP is about to average for the first
        time what it was kept from (`no_sync`).
        """
        if self.pending is None:
            pending.scale_up([param.grad for param in owned])
            self._wait_in(pending)
        if self.is_unreduced and self.reduces:
            self.masters.put_grads_back(set(map(id, owned)))

    def after_backward(self, scaler: Scaler, scale: Any, sharing: Sharing) -> Flag | None:
        """Unscale the new gradients and add them to the earlier ones; returns found_inf."""
        self.in_block = False
        taken = self.masters.take_grads() if self.masters.by_half else None
        if self.reduces is not None:
            self.is_unreduced = not self.reduces
        if self.pending is not None:
            self.pending = None
            if taken is not None:
                add_to(*taken)
            self._add_aside()
            return self._unscale_all(scaler, scale, sharing)
        if taken is None:
            found = self._unscale_all(scaler, scale, sharing)
        else:
            found = self._unscale_taken(*taken, scaler, scale, sharing)
        if self._aside:
            self._add_aside()
        return found

    def _unscale_taken(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        scaler: Scaler,
        scale: Any,
        sharing: Sharing,
    ) -> Flag | None:
        """Unscale what came out of half weights, and what the pass left in the others, or, where
        the loss was made of masters, in those.
        """
        own = self._held()
        all_grads = [*map(_grad_of, own), *grads]
        found = sharing.unscale(self, scaler, [*own, *masters], all_grads, scale)
        add_to(masters, grads)
        return found

    def leave_scaled(self, pending: Pending, sharing: Sharing) -> None:
        """`delay_unscale`: bring everything to the scaler's scale and leave it there."""
        self.in_block = False
        taken = self.masters.take_grads()
        if self.reduces is not None:
            self.is_unreduced = not self.reduces
        if self.pending is None:
            pending.scale_up([grad for _, grad in self._aside])
        add_to(*taken)
        self._add_aside()
        self._wait_in(pending)

    def _wait_in(self, pending: Pending) -> None:
        self.pending = pending
        pending.join(self)

    def abandon_backward(self, sharing: Sharing) -> None:
        """The backward pass failed: drop what it left, put back what was there.

        With several ranks the earlier gradients are where backward added to
        them; they stay, and what the failed pass added stays with them.
        """
        if not self.in_block:
            return
        self.in_block = False
        taken = self.masters.take_grads()
        if world_size() > 1 and self.pending is not None:
            add_to(*taken)
            return
        for param in sharing.owned(self, self.parameters()):
            param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        self._aside = []

    def drop_gradients(self) -> None:
        """Have no gradients, those set aside among them, rather than some that are half done."""
        self.in_block = False
        self._aside = []
        self.forget_gradients()
        for param in self.parameters():
            param.grad = None

    def _add_aside(self) -> None:
        for param, grad in self._aside:
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        self._aside = []
