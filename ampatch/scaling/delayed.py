"""Work that is delayed until an optimizer's step.

* Unscaling of gradients that `delay_unscale` left scaled.
* Updates of loss scales, with `delay_overflow_check` or several processes.  In DDP's `no_sync` only
  one rank may see an inf, but at the step all ranks have seen the inf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ..log import logger
from .gradients import (
    AppliedScale,
    OptimizerBlock,
    OptimizerGradients,
    OverflowCheck,
    find_owners,
)
from .loss_scaler import DynamicScaler, Scaler
from .process_group import trains_with_others
from .scale_value import OverflowFlag, combine_flags
from .unscaling import add_back


class DelayedCheck(NamedTuple):
    """A check that `delay_overflow_check` postponed, and the member whose gradients it covers."""

    member: OptimizerGradients
    check: OverflowCheck


# Gradients that stay scaled


def leave_scaled(
    member: OptimizerGradients, block: OptimizerBlock, shared_scale: AppliedScale
) -> None:
    """End a block with `delay_unscale`: scale the saved gradients too, and leave all scaled."""
    shared_scale.add_member(member, [grad for _, grad in block.saved_grads])
    add_back(block.saved_grads)
    member.block = None


def unscale_if_scale_differs(member: OptimizerGradients, scaler: Scaler) -> None:
    """Unscale gradients that still have another scale than `scaler`; called before a block.

    A block that was interrupted is abandoned first.
    """
    member.abandon()
    applied = member.applied_scale
    if applied is None or (applied.scaler is scaler and applied.generation == scaler.generation):
        return
    unscale_delayed(member)


def unscale_delayed(member: OptimizerGradients) -> None:
    """Unscale gradients that `delay_unscale` left scaled, in all optimizers that share the scale.

    The scaler counts one step.  In an open block the function does nothing, because the block
    unscales at the end.
    """
    applied = member.applied_scale
    if applied is None or member.block is not None:
        return
    members = [m for m in applied.members if m.applied_scale is applied and m.block is None]
    owner_of = find_owners(members)
    flags: list[OverflowFlag] = []
    try:
        for member in members:
            member.applied_scale = None
            check = member.unscale(applied.scaler, applied.scale, owner_of)
            if check is not None:
                member.keep_check(check)
                flags.append(check.found_inf)
    except BaseException:  # some are unscaled and some not
        for member in members:
            member.drop_all()
        raise
    if isinstance(applied.scaler, DynamicScaler):
        update_now_or_at_step(applied.scaler, members, flags)


def unscale_before_clipping(member: OptimizerGradients, param_ids: set[int]) -> bool:
    """Unscale the member's gradients if the member has some of the parameters to be clipped (ids).

    Returns whether the member has some; False while a block of the optimizer is open.
    """
    if not any(id(param) in param_ids for param in member.parameters()):
        return False
    if member.block is not None:
        logger.error(
            "%s: gradients are clipped inside its ampatch.scale_loss block, where they are "
            "still scaled. Clip them after the block.",
            type(member.optimizer).__name__,
        )
        return False
    unscale_delayed(member)
    found_inf = member.recheck()  # clipping may hide an inf that came from another rank
    if found_inf is not None:
        for pending in member.pending_updates:
            pending.add_flags([found_inf])
    return True


# Updates of loss scales at the step


class PendingScaleUpdate:
    """An update of a scaler that waits for the step.

    The update runs before the first step of any member's optimizer, with the overflow flags that
    were collected until then.

    `skips_together`: if the gradients of one optimizer overflow, all these optimizers skip.
    """

    def __init__(self, scaler: DynamicScaler, skips_together: bool) -> None:
        self.scaler = scaler
        self._skips_together = skips_together
        self._members: list[OptimizerGradients] = []
        self._found_inf: OverflowFlag | None = None  # all flags in one; None: nothing was checked
        self._checks: list[DelayedCheck] | None = None

    def add_members(self, members: Sequence[OptimizerGradients]) -> None:
        """Make a step of the optimizers of `members` run this update too."""
        for member in members:
            if member not in self._members:
                self._members.append(member)
                member.pending_updates.append(self)

    def add_flags(self, flags: list[OverflowFlag]) -> None:
        """Keep these flags for the update."""
        for flag in flags:
            self._found_inf = (
                flag if self._found_inf is None else combine_flags(self._found_inf, flag)
            )

    def delay_checks(self, checks: list[DelayedCheck]) -> None:
        """Keep these checks until the step, which gives them to their members."""
        self._checks = [*(self._checks or []), *checks]

    def forget_checks(self, member: OptimizerGradients) -> None:
        """Forget the delayed checks of a member whose gradients were zeroed."""
        if self._checks is not None:
            self._checks = [each for each in self._checks if each.member is not member]

    def recheck_gradients(self) -> None:
        """Check all gradients for overflow once more, before the first step."""
        self._hand_over_checks()
        flags = [flag for member in self._members if (flag := member.recheck()) is not None]
        self.add_flags(flags)
        if self._skips_together:
            _skip_all_if_any(self._members, self.scaler, flags)

    def update_scaler(self) -> None:
        """Update the scaler with the flags, as the first optimizer steps."""
        self._hand_over_checks()
        for member in self._members:
            member.pending_updates = [u for u in member.pending_updates if u is not self]
        self.scaler.update([] if self._found_inf is None else [self._found_inf])
        self.scaler.was_updated_by_step = self._checks is not None

    def _hand_over_checks(self) -> None:
        """Give delayed checks to their members, so that an overflow skips their steps.

        After `drop_pending_updates` this is not called: the checks are dropped with the update.
        """
        if self._checks is not None:
            checks = self._checks
            self._checks = []
            for member, check in checks:
                member.keep_check(check)


def update_now_or_at_step(
    scaler: DynamicScaler,
    members: Sequence[OptimizerGradients],
    flags: list[OverflowFlag],
    *,
    delayed: list[DelayedCheck] | None = None,
    skips_together: bool = False,
) -> None:
    """Update a scaler with the overflow flags of `members`, now or at the step.

    The update waits for the step if there are several ranks, or if `delayed` is given.
    """
    if skips_together:
        _skip_all_if_any(members, scaler, flags)
    existing = [u for member in members for u in member.pending_updates if u.scaler is scaler]
    is_pending = delayed is not None or trains_with_others()
    if not (existing or is_pending):
        scaler.update(flags)
        return
    pending_update = existing[0] if existing else PendingScaleUpdate(scaler, skips_together)
    pending_update.add_members(members)
    pending_update.add_flags(flags)
    if delayed is not None:
        pending_update.delay_checks(delayed)
    if not is_pending:
        pending_update.update_scaler()


def run_pending_updates(member: OptimizerGradients) -> None:
    """Before a step: check the gradients once more, and update the scalers with the flags."""
    updates = list(member.pending_updates)
    for pending in updates:
        pending.recheck_gradients()
    for pending in updates:
        pending.update_scaler()


def skip_together(members: Sequence[OptimizerGradients]) -> None:
    """If one optimizer of `members` has overflowed, have all of them skip their next step.

    Call it before gradients are clipped by a common norm, because a norm of inf or NaN also ruins
    finite gradients, and their optimizer would step.
    """
    checks = [
        member.check
        for member in members
        if member.check is not None and not member.check.is_consumed
    ]
    if len(members) > 1 and checks:
        _skip_all_if_any(members, checks[0].scaler, [check.found_inf for check in checks])


def _skip_all_if_any(
    members: Sequence[OptimizerGradients], scaler: Scaler, flags: list[OverflowFlag]
) -> None:
    """Keep one flag for all of `members`, which is set if one of `flags` is."""
    if flags:
        found_inf = functools.reduce(combine_flags, flags)
        for member in members:
            member.keep_flag(found_inf, scaler)


def drop_pending_updates(scaler: Scaler, members: Sequence[OptimizerGradients]) -> None:
    """Forget the updates of `scaler` that `delay_overflow_check` has left to the next step.

    This serves a script that calls `update_scale()` and decides itself whether to step.  The step
    then updates no scale, and is skipped only after an overflow in another block.
    """
    for member in members:
        member.pending_updates = [u for u in member.pending_updates if u.scaler is not scaler]
