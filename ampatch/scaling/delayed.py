"""What waits for an optimizer's step, beside its gradients.

* Gradients that `delay_unscale` leaves scaled.
* Updates of loss scales, with `delay_overflow_check` or with several processes: in DDP's `no_sync`
  one rank alone may see an inf; at the step all ranks have seen it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..log import logger
from .gradients import Block, Check, Gradients, ScaledGradients, unscalers_among
from .loss_scaler import DynamicScaler, Scaler
from .process_group import trains_with_others
from .scale_value import Flag, either
from .unscaling import add_back

# Gradients that stay scaled


def leave_scaled(gradients: Gradients, block: Block, shared: ScaledGradients) -> None:
    """Multiply the earlier gradients by the scale of the block that ends; all stay scaled."""
    grads = [grad for _, grad in block.saved]
    shared.join(gradients, grads)
    add_back(block.saved)
    gradients.block = None


def unscale_at_other_scale(gradients: Gradients, scaler: Scaler) -> None:
    """Before a block of `scaler`: unscale gradients that are scaled by another scale.

    Abandons an earlier block that was interrupted before its end.
    """
    gradients.abandon()
    scaled = gradients.scaled
    if scaled is None or (scaled.scaler is scaler and scaled.generation == scaler.generation):
        return
    unscale_delayed(gradients)


def unscale_delayed(gradients: Gradients) -> None:
    """Unscale the gradients that `delay_unscale` left scaled, of all optimizers of their loss.

    The scaler counts one step.  Does nothing in an open block, which unscales them as it ends.
    """
    scaled = gradients.scaled
    if scaled is None or gradients.block is not None:
        return
    members = [g for g in scaled.members if g.scaled is scaled and g.block is None]
    unscalers = unscalers_among(members)
    flags: list[Flag] = []
    try:
        for member in members:
            member.scaled = None
            check = member.unscale(scaled.scaler, scaled.scale, unscalers)
            if check is not None:
                member.keep_check(check)
                flags.append(check.found_inf)
    except BaseException:  # some are unscaled and some not
        for member in members:
            member.drop_all()
        raise
    if isinstance(scaled.scaler, DynamicScaler):
        update_now_or_at_step(scaled.scaler, members, flags)


def unscale_to_clip(gradients: Gradients, param_ids: set[int]) -> bool:
    """Unscale the optimizer's gradients, if some of these tensors (ids) are about to be clipped.

    Returns whether the optimizer has such a tensor and no open block.
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
    found_inf = gradients.recheck()  # clipping may hide what another rank's inf has left
    if found_inf is not None:
        for pending in gradients.pending_updates:
            pending.add_flags([found_inf])
    return True


# Updates that wait for the step


class PendingScaleUpdate:
    """An update of a scaler by overflow flags, which waits for the first step of its optimizers.

    `skips_together`: after an overflow in the gradients of one optimizer all of them skip.
    """

    def __init__(self, scaler: DynamicScaler, skips_together: bool) -> None:
        self.scaler = scaler
        self._skips_together = skips_together
        self._members: list[Gradients] = []
        self._found_inf: Flag | None = None  # None: nothing was checked
        self._delayed: list[tuple[Gradients, Check]] | None = None

    def add_optimizers(self, optimizers: Sequence[Gradients]) -> None:
        """Also update at a step of these optimizers."""
        for gradients in optimizers:
            if gradients not in self._members:
                self._members.append(gradients)
                gradients.pending_updates.append(self)

    def add_flags(self, flags: list[Flag]) -> None:
        """Keep these flags for the update."""
        for flag in flags:
            self._found_inf = flag if self._found_inf is None else either(self._found_inf, flag)

    def delay_checks(self, checks: list[tuple[Gradients, Check]]) -> None:
        """Keep checks under `delay_overflow_check`: no optimizer has them yet."""
        self._delayed = [*(self._delayed or []), *checks]

    def forget_checks(self, gradients: Gradients) -> None:
        """An optimizer's gradients were zeroed."""
        if self._delayed is not None:
            self._delayed = [entry for entry in self._delayed if entry[0] is not gradients]

    def recheck_gradients(self) -> None:
        """Check all gradients for overflow once more, before the first step."""
        self._hand_over_checks()
        flags = [flag for g in self._members if (flag := g.recheck()) is not None]
        self.add_flags(flags)
        if self._skips_together:
            _skip_together(self._members, self.scaler, flags)

    def update_scaler(self) -> None:
        """Update the scaler by the flags, as the first optimizer steps."""
        self._hand_over_checks()
        for gradients in self._members:
            gradients.pending_updates = [u for u in gradients.pending_updates if u is not self]
        self.scaler.update([] if self._found_inf is None else [self._found_inf])
        self.scaler.was_updated_by_step = self._delayed is not None

    def _hand_over_checks(self) -> None:
        """Let delayed checks decide about the steps, as the script has not."""
        checks, self._delayed = self._delayed, None if self._delayed is None else []
        for gradients, check in checks or ():
            gradients.keep_check(check)


def update_now_or_at_step(
    scaler: DynamicScaler,
    optimizers: Sequence[Gradients],
    flags: list[Flag],
    *,
    delayed: list[tuple[Gradients, Check]] | None = None,
    skips_together: bool = False,
) -> None:
    """Update a scaler by the overflow flags of its gradients, now or at the step.

    The update waits for the step among several ranks, and for `delayed`: checks under
    `delay_overflow_check`.
    """
    if skips_together:
        _skip_together(optimizers, scaler, flags)
    existing = [u for g in optimizers for u in g.pending_updates if u.scaler is scaler]
    waits = delayed is not None or trains_with_others()
    if not (existing or waits):
        scaler.update(flags)
        return
    pending_update = existing[0] if existing else PendingScaleUpdate(scaler, skips_together)
    pending_update.add_optimizers(optimizers)
    pending_update.add_flags(flags)
    if delayed is not None:
        pending_update.delay_checks(delayed)
    if not waits:
        pending_update.update_scaler()


def run_pending_updates(gradients: Gradients) -> None:
    """Before a step: check the gradients once more, and update the scalers by the flags."""
    updates = list(gradients.pending_updates)
    for pending in updates:
        pending.recheck_gradients()
    for pending in updates:
        pending.update_scaler()


def skip_together(optimizers: Sequence[Gradients]) -> None:
    """Have all these optimizers skip after an overflow in one: one norm clips their gradients.

    Else a norm of inf or NaN would reach finite gradients, and their optimizer would step.
    """
    checks = [
        gradients.check
        for gradients in optimizers
        if gradients.check is not None and not gradients.check.is_used
    ]
    if len(optimizers) > 1 and checks:
        _skip_together(optimizers, checks[0].scaler, [check.found_inf for check in checks])


def _skip_together(optimizers: Sequence[Gradients], scaler: Scaler, flags: list[Flag]) -> None:
    """Have all of these optimizers skip, if the gradients of one have overflowed."""
    if flags:
        found_inf = functools.reduce(either, flags)
        for gradients in optimizers:
            gradients.keep_flag(found_inf, scaler)


def drop_pending_updates(scaler: Scaler, optimizers: Sequence[Gradients]) -> None:
    """Forget the updates of `scaler` that `delay_overflow_check` has left to the next step.

    For a script that decides about the step by itself.  The step then moves no scale; only an
    overflow in other blocks skips it.
    """
    for gradients in optimizers:
        gradients.pending_updates = [u for u in gradients.pending_updates if u.scaler is not scaler]
