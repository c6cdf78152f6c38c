"""Work that is put off until an optimizer's step.

* Unscaling of gradients that `delay_unscale` left scaled.
* Updates of loss scales, with `delay_overflow_check`, or with several processes: in DDP's `no_sync`
  only one rank may see an inf; at the step all ranks have seen it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..log import logger
from .gradients import (
    AppliedScale,
    OptimizerBlock,
    OptimizerGradients,
    OverflowCheck,
    find_first_optimizers,
)
from .loss_scaler import DynamicScaler, Scaler
from .process_group import trains_with_others
from .scale_value import OverflowFlag, either
from .unscaling import add_back

# Gradients that stay scaled


def leave_scaled(
    gradients: OptimizerGradients, block: OptimizerBlock, shared_scale: AppliedScale
) -> None:
    """End a block with `delay_unscale`: saved gradients get its scale too, and all stay scaled."""
    shared_scale.add_member(gradients, [grad for _, grad in block.saved])
    add_back(block.saved)
    gradients.block = None


def unscale_if_scale_differs(gradients: OptimizerGradients, scaler: Scaler) -> None:
    """Before a block of `scaler`: unscale gradients that still have another scale.

    First abandons a block that was interrupted.
    """
    gradients.abandon()
    applied = gradients.applied_scale
    if applied is None or (applied.scaler is scaler and applied.generation == scaler.generation):
        return
    unscale_delayed(gradients)


def unscale_delayed(gradients: OptimizerGradients) -> None:
    """Unscale gradients that `delay_unscale` left scaled, in all optimizers that share the scale.

    The scaler counts one step.  In an open block it does nothing: the block unscales at its end.
    """
    applied = gradients.applied_scale
    if applied is None or gradients.block is not None:
        return
    members = [g for g in applied.members if g.applied_scale is applied and g.block is None]
    first_optimizer_of = find_first_optimizers(members)
    flags: list[OverflowFlag] = []
    try:
        for member in members:
            member.applied_scale = None
            check = member.unscale(applied.scaler, applied.scale, first_optimizer_of)
            if check is not None:
                member.keep_check(check)
                flags.append(check.found_inf)
    except BaseException:  # some are unscaled and some not
        for member in members:
            member.drop_all()
        raise
    if isinstance(applied.scaler, DynamicScaler):
        update_now_or_at_step(applied.scaler, members, flags)


def unscale_before_clipping(gradients: OptimizerGradients, param_ids: set[int]) -> bool:
    """Unscale the optimizer's gradients if some of the parameters to be clipped (ids) are its own.

    Returns whether some are its own; False while a block of the optimizer is open.
    """
    if not any(id(param) in param_ids for param in gradients.parameters()):
        return False
    if gradients.block is not None:
        logger.error(
            "%s: gradients are clipped inside its ampatch.scale_loss block, where they are "
            "still scaled. Clip them after the block.",
            type(gradients.optimizer).__name__,
        )
        return False
    unscale_delayed(gradients)
    found_inf = gradients.recheck()  # clipping may hide an inf that came from another rank
    if found_inf is not None:
        for pending in gradients.pending_updates:
            pending.add_flags([found_inf])
    return True


# Updates of loss scales at the step


class PendingScaleUpdate:
    """An update of a scaler, by overflow flags, before the first step of one of `_members`.

    `skips_together`: after an overflow in the gradients of one optimizer all of them skip.
    """

    def __init__(self, scaler: DynamicScaler, skips_together: bool) -> None:
        self.scaler = scaler
        self._skips_together = skips_together
        self._members: list[OptimizerGradients] = []
        self._found_inf: OverflowFlag | None = None  # all flags in one; None: nothing was checked
        # The checks that `delay_overflow_check` postponed.
        self._delayed: list[tuple[OptimizerGradients, OverflowCheck]] | None = None

    def add_members(self, members: Sequence[OptimizerGradients]) -> None:
        """Also update at a step of the optimizers of `members`."""
        for gradients in members:
            if gradients not in self._members:
                self._members.append(gradients)
                gradients.pending_updates.append(self)

    def add_flags(self, flags: list[OverflowFlag]) -> None:
        """Keep these flags for the update."""
        for flag in flags:
            self._found_inf = flag if self._found_inf is None else either(self._found_inf, flag)

    def delay_checks(self, checks: list[tuple[OptimizerGradients, OverflowCheck]]) -> None:
        """Keep checks of `delay_overflow_check` until the step, and then hand them over."""
        self._delayed = [*(self._delayed or []), *checks]

    def forget_checks(self, gradients: OptimizerGradients) -> None:
        """Forget the delayed checks of an optimizer whose gradients were zeroed."""
        if self._delayed is not None:
            self._delayed = [entry for entry in self._delayed if entry[0] is not gradients]

    def recheck_gradients(self) -> None:
        """Check all gradients for overflow once more, before the first step."""
        self._hand_over_checks()
        flags = [flag for g in self._members if (flag := g.recheck()) is not None]
        self.add_flags(flags)
        if self._skips_together:
            _share_overflow(self._members, self.scaler, flags)

    def update_scaler(self) -> None:
        """Update the scaler by the flags, as the first optimizer steps."""
        self._hand_over_checks()
        for gradients in self._members:
            gradients.pending_updates = [u for u in gradients.pending_updates if u is not self]
        self.scaler.update([] if self._found_inf is None else [self._found_inf])
        self.scaler.was_updated_by_step = self._delayed is not None

    def _hand_over_checks(self) -> None:
        """Give delayed checks to their optimizers, whose steps are skipped by them.

        After `drop_pending_updates` this is not called: the checks are dropped with the update.
        """
        if self._delayed is not None:
            checks = self._delayed
            self._delayed = []
            for gradients, check in checks:
                gradients.keep_check(check)


def update_now_or_at_step(
    scaler: DynamicScaler,
    members: Sequence[OptimizerGradients],
    flags: list[OverflowFlag],
    *,
    delayed: list[tuple[OptimizerGradients, OverflowCheck]] | None = None,
    skips_together: bool = False,
) -> None:
    """Update a scaler by the overflow flags of `members`, now or at the step.

    At the step if there are several ranks, or if `delayed` is given: the checks that
    `delay_overflow_check` postponed.
    """
    if skips_together:
        _share_overflow(members, scaler, flags)
    existing = [u for g in members for u in g.pending_updates if u.scaler is scaler]
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


def run_pending_updates(gradients: OptimizerGradients) -> None:
    """Before a step: check the gradients once more, and update the scalers by the flags."""
    updates = list(gradients.pending_updates)
    for pending in updates:
        pending.recheck_gradients()
    for pending in updates:
        pending.update_scaler()


def skip_together(members: Sequence[OptimizerGradients]) -> None:
    """If one optimizer of `members` has overflowed, have all of them skip their next step.

    Called before the gradients are clipped by one norm: a norm of inf or NaN ruins finite gradients
    too, and their optimizer would step.
    """
    checks = [
        gradients.check
        for gradients in members
        if gradients.check is not None and not gradients.check.is_consumed
    ]
    if len(members) > 1 and checks:
        _share_overflow(members, checks[0].scaler, [check.found_inf for check in checks])


def _share_overflow(
    members: Sequence[OptimizerGradients], scaler: Scaler, flags: list[OverflowFlag]
) -> None:
    """Keep one flag for all optimizers of `members`: it is set if one of `flags` is."""
    if flags:
        found_inf = functools.reduce(either, flags)
        for gradients in members:
            gradients.keep_flag(found_inf, scaler)


def drop_pending_updates(scaler: Scaler, members: Sequence[OptimizerGradients]) -> None:
    """Forget the updates of `scaler` that `delay_overflow_check` has left to the next step.

    For a script that calls `update_scale()` and decides itself whether to step.  The step then
    updates no scale; it is skipped only after an overflow in another block.
    """
    for gradients in members:
        gradients.pending_updates = [u for u in gradients.pending_updates if u.scaler is not scaler]
