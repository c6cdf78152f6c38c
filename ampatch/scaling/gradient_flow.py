"""The gradients of one optimizer, from `scale_loss` blocks to the step: unscaled and checked.

When a block begins, complete gradients are set aside, so that what backward adds can be unscaled
by itself; then both are added up.  Gradients that wait scaled (`delay_unscale`) stay in `.grad`,
where backward adds to them, so that what a script reduces, reads or clips in the block is the whole
sum.  With several ranks complete ones stay too, at the scale of the new ones: one all-reduce serves
both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..log import logger
from .gradient_state import Event, GradientState, Pending, State, Unscaled
from .loss_scaler import Scaler
from .optimizers import zero
from .other_blocks import OtherBlocks, entering
from .process_group import share_flag, sharers, trains_with_others, world_size
from .scale_value import Flag, is_set
from .shared_parameters import NOTHING_SHARED, Sharing
from .tensor_lists import drop_grads, grads_of, put_back, with_grads

_grad_of = operator.attrgetter("grad")


class GradientFlow:
    """What happens to the gradients of `optimizer`; `state` says where they are on their way.

    The ranks of `process_group` share their overflow flag in each block, those of `step_group`
    at each step.
    """

    def __init__(self, optimizer: Any, process_group: Any = None) -> None:
        self.optimizer = optimizer
        self.state = GradientState(optimizer)
        self.others = OtherBlocks(optimizer, self.state, self.parameters)
        self._process_group = process_group
        self.step_group = zero.group_of(optimizer)

    def parameters(self) -> Sequence[Tensor]:
        """The tensors the optimizer updates; of a single group its own list, for reading."""
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def has_gradients(self) -> bool:
        """Whether there is anything to step on."""
        for param in self.parameters():
            if param.grad is not None:
                return True
        return False

    # A block

    def gather(self, scaler: Scaler) -> list[Tensor]:
        """Complete the gradients before a block; returns the parameters that have some.

        What is pending is unscaled, unless new gradients of `scaler` may be added to it.
        """
        state = self.state
        if state.pending is not None and not state.pending.is_scaled_by(scaler):
            state.finish_pending()
        if self.others.left_scaled:
            self.others.report()
        state.had_block = True
        if state.now is State.SPENT:
            self.look_again()
        return self._held()

    def make_room(
        self, held: list[Tensor], pending: Callable[[], Pending], sharing: Sharing
    ) -> None:
        """Begin the block: what `gather` found is set aside, or stays, scaled."""
        state = self.state
        owned: list[Tensor] = []
        stays = False
        state.aside = []
        if held:
            owned = sharing.owned(self, held)
            stays = state.now is State.PENDING or world_size() > 1
            if not stays:
                state.aside = list(zip(owned, map(_grad_of, owned), strict=True))
        else:
            state.overflow = None
            if state.now is not State.COMPLETE:
                self.zeroed()
        with entering:
            state.change(Event.ENTER)  # from here on there is something to put back
            self.others.own_blocks += 1
        if stays:
            self._put_back_scaled(owned, pending())
        for param, _ in state.aside:  # so that what backward adds can be unscaled by itself
            param.grad = None

    def _put_back_scaled(self, owned: list[Tensor], pending: Pending) -> None:
        """Leave earlier gradients where backward adds to them, at the scale of the block."""
        if self.state.now is State.IN_BLOCK:
            pending.scale_up(list(map(_grad_of, owned)))
            self.state.change(Event.SCALE_UP, pending)
            pending.join(self)

    def after_backward(self, scaler: Scaler, scale: Any, sharing: Sharing) -> Flag | None:
        """Unscale the new gradients and add them to the earlier ones; returns found_inf."""
        self.state.change(Event.LEAVE)
        found = self._unscale_all(scaler, scale, sharing)
        if self.state.aside:
            self._add_aside()
        return found

    def leave_scaled(self, pending: Pending, sharing: Sharing) -> None:
        """`delay_unscale`: bring everything to the scaler's scale and leave it there."""
        one_scale = self.state.now is State.IN_BLOCK_PENDING
        self.state.change(Event.DELAY, pending)
        if not one_scale:
            pending.scale_up([grad for _, grad in self.state.aside])
        self._add_aside()
        pending.join(self)

    def _add_aside(self) -> None:
        put_back(self.state.aside)
        self.state.aside = []

    def abandon_backward(self, sharing: Sharing) -> None:
        """The backward pass failed: drop what it left, put back what was there.

        Where backward added to earlier gradients, what it added stays in them, which is logged.
        """
        state = self.state
        if not state.in_block:
            return
        one_scale = state.now is State.IN_BLOCK_PENDING
        state.change(Event.ABANDON)
        if one_scale:
            logger.warning(
                "%s: an ampatch.scale_loss block has raised, and earlier gradients were in p.grad "
                "for its backward pass to add to (delay_unscale=True, or several ranks). What it "
                "added stays there, as in a training without ampatch. optimizer.zero_grad() drops "
                "the gradients of all micro-batches.",
                type(self.optimizer).__name__,
            )
            return
        drop_grads(sharing.owned(self, self.parameters()))
        for param, grad in state.aside:
            param.grad = grad
        state.aside = []

    def drop_gradients(self) -> None:
        """Drop all gradients, also those set aside: some may be unscaled and some not."""
        self.state.change(Event.DROP)
        self.zeroed()
        drop_grads(self.parameters())

    # Unscaling

    def check(
        self, scaler: Scaler, grads: list[Tensor], scale: Any, concerned: Sequence[GradientFlow]
    ) -> Flag | None:
        """Unscale, and look for overflow on behalf of all `concerned`; returns found_inf."""
        found = scaler.unscale_(grads, scale)
        if found is None or not (grads or self._process_group):
            return None  # without gradients there is nothing to learn for the scale
        groups, are_all = sharers(self._process_group, grads)
        if groups:
            found = share_flag(found, groups, grads)
        by = Unscaled(scaler, scale)
        for flow in concerned:
            flow.state.note_overflow(found, by, are_all)
        return found

    def _held(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        return with_grads(self.parameters())

    def _unscale_all(self, scaler: Scaler, scale: Any, sharing: Sharing) -> Flag | None:
        if sharing is NOTHING_SHARED:
            return self.check(scaler, grads_of(self.parameters()), scale, (self,))
        params = self._held()
        return sharing.unscale(self, scaler, params, list(map(_grad_of, params)), scale)

    def unscale_pending(self, scaler: Scaler, scale: Any, sharing: Sharing) -> Flag | None:
        """This optimizer's part of `Pending.finish`; returns found_inf."""
        self.state.change(Event.UNSCALE)
        return self._unscale_all(scaler, scale, sharing)

    def look_again(self) -> Flag | None:
        """Look for overflow in gradients that may be others than their block has checked.

        A step has used them and they were not zeroed: an inf may be left.  Or several processes
        train: a script may have averaged the inf of another rank into them.  Returns found_inf;
        None: there was nothing to look for.
        """
        state = self.state
        is_spent = state.now is State.SPENT
        is_checked = state.now is State.COMPLETE and state.overflow is not None
        if not is_spent and not (is_checked and not state.known_to_all and trains_with_others()):
            return None
        if is_spent:
            state.change(Event.RECHECK)
        by = state.unscaled_by
        if by is None or not self.has_gradients():
            return None
        as_they_are = by.scale / by.scale  # 1, where the scale lives
        return self._unscale_all(by.scaler, as_they_are, NOTHING_SHARED)

    # Steps and zeroes

    def share_overflow(self) -> None:
        """Have all ranks of `step_group` know of an overflow on one; each of them asks.

        A rank whose gradients are none of this step (`Join`) decides as the others do.
        """
        state = self.state
        seen = state.overflow
        found = share_flag(False if seen is None else seen, [self.step_group], self.parameters())
        state.overflow = found
        for deferred in state.waiting:
            deferred.scaler.defer([found])

    def take_found_inf(self) -> Flag | None:
        """The overflow flag of the present gradients, for a step; None: nothing was checked."""
        state = self.state
        if state.now is State.SPENT:
            self.look_again()
        found, state.overflow = state.overflow, None
        if found is not None:
            state.change(Event.STEP)
        if self.step_group is not None or self.has_gradients():
            return found
        return None  # setting them to None takes the overflow away too

    def take_overflow(self) -> bool:
        """Whether the gradients gathered since the last look overflowed.  Waits for the device."""
        found = self.take_found_inf()
        return found is not None and is_set(found)

    def zeroed(self) -> None:
        """All gradients were zeroed: nothing is pending, no overflow is remembered."""
        state = self.state
        if state.now is not State.COMPLETE:
            state.change(Event.ZERO)
        state.overflow, state.aside = None, []
        self.others.left_scaled = False

    def zeroed_by_model(self, zeroed: set[int]) -> None:
        """Parameters (ids) of a model were zeroed; forget an overflow if no gradients are left."""
        state = self.state
        state.aside = [(param, grad) for param, grad in state.aside if id(param) not in zeroed]
        is_known = state.overflow is not None or state.now is State.SPENT
        if (is_known or self.others.left_scaled) and all(
            param.grad is None or id(param) in zeroed for param in self.parameters()
        ):
            state.overflow = None
            self.others.left_scaled = False
            if state.now is State.SPENT:
                state.change(Event.ZERO)

    def ready(self, wanted: set[int]) -> None:
        """Gradients of these tensors (ids) are about to be used: leave none scaled."""
        if any(id(param) in wanted for param in self.parameters()):
            if self.state.in_block:
                logger.error(
                    "%s: gradients are clipped inside its ampatch.scale_loss block, where they are "
                    "still scaled. Clip them after the block.",
                    type(self.optimizer).__name__,
                )
                return
            self.state.finish_pending()
            self.look_again()  # clipping may hide what another rank's inf has left
