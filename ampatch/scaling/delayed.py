"""What waits for an optimizer's step, beside its gradients.

Gradients that `delay_unscale` leaves scaled, updates of loss scales that `delay_overflow_check`
leaves to the step, or that several processes make there: in DDP's `no_sync` one rank alone may see
an inf; at the step all ranks have seen it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..log import logger
from .gradients import Block, Check, Gradients, Scaled, unscalers_among
from .loss_scaler import DynamicScaler, Scaler
from .process_group import trains_with_others
from .scale_value import Flag, either
from .unscaling import add_back

# Gradients that wait scaled


def leave_scaled(gradients: Gradients, block: Block, shared: Scaled) -> None:
    """A block ends: earlier gradients are scaled as those of the block, and all are left so."""
    grads = [grad for _, grad in block.aside]
    shared.join(gradients, grads)
    add_back(block.aside)
    gradients.block = None


def settle(gradients: Gradients, scaler: Scaler) -> None:
    """A block of `scaler` begins: what waits at another scale is unscaled.

    A block that was interrupted before its end is abandoned.
    """
    gradients.abandon()
    scaled = gradients.scaled
    if scaled is None or (scaled.scaler is scaler and scaled.generation == scaler.generation):
        return
    finish(gradients)


def finish(gradients: Gradients) -> None:
    """Unscale what waits scaled, of all optimizers of that loss: the scaler counts one step.

    Nothing in an open block, which unscales its optimizer's gradients.
    """
    scaled = gradients.scaled
    if scaled is None or gradients.block is not None:
        return
    several = [one for one in scaled.members if one.scaled is scaled and one.block is None]
    unscalers = unscalers_among(several)
    flags: list[Flag] = []
    try:
        for one in several:
            one.scaled = None
            check = one.unscale(scaled.scaler, scaled.scale, unscalers)
            if check is not None:
                one.keep(check)
                flags.append(check.found_inf)
    except BaseException:  # some are unscaled and some not
        for one in several:
            one.drop()
        raise
    if isinstance(scaled.scaler, DynamicScaler):
        update(scaled.scaler, several, flags)


def ready(gradients: Gradients, wanted: set[int]) -> bool:
    """Gradients of these tensors (ids) are about to be clipped: leave none scaled.

    Returns whether there are such gradients, outside of a block.
    """
    if not any(id(param) in wanted for param in gradients.parameters()):
        return False
    if gradients.block is not None:
        logger.error(
            "%s: gradients are clipped inside its ampatch.scale_loss block, where they are "
            "still scaled. Clip them after the block.",
            type(gradients.optimizer).__name__,
        )
        return False
    finish(gradients)
    found_inf = gradients.look_again()  # clipping may hide what another rank's inf has left
    if found_inf is not None:
        for waiting in gradients.waiting:
            waiting.add([found_inf])
    return True


# Updates that wait for the step


class Update:
    """A scaler's update, with its overflow flags.  It waits for the first step of some optimizers.

    `together`: an overflow in the gradients of one optimizer has all of them skip.
    """

    def __init__(self, scaler: DynamicScaler, together: bool) -> None:
        self.scaler = scaler
        self._together = together
        self._several: list[Gradients] = []
        self._found: Flag | None = None  # None: there is nothing to learn
        self._held: list[tuple[Gradients, Check]] | None = None

    def join(self, several: Sequence[Gradients]) -> None:
        """Wait for the first step of these optimizers as well."""
        for one in several:
            if one not in self._several:
                self._several.append(one)
                one.waiting.append(self)

    def add(self, flags: list[Flag]) -> None:
        """Keep these flags for the update."""
        for found in flags:
            self._found = found if self._found is None else either(self._found, found)

    def hold(self, held: list[tuple[Gradients, Check]]) -> None:
        """`delay_overflow_check`: no step knows of these until now."""
        self._held = [*(self._held or []), *held]

    def forget(self, gradients: Gradients) -> None:
        """An optimizer's gradients were zeroed."""
        if self._held is not None:
            self._held = [held for held in self._held if held[0] is not gradients]

    def look_again(self) -> None:
        """Look for overflow in all gradients once more, before the first step."""
        self._release()
        flags = [found for one in self._several if (found := one.look_again()) is not None]
        self.add(flags)
        if self._together:
            _skip_together(self._several, self.scaler, flags)

    def make(self) -> None:
        """The scaler reacts to the flags that were kept: the first optimizer steps."""
        self._release()
        for one in self._several:
            one.waiting = [waiting for waiting in one.waiting if waiting is not self]
        self.scaler.update([] if self._found is None else [self._found])
        self.scaler.has_reacted_unasked = self._held is not None

    def _release(self) -> None:
        """The script has not decided about the step by itself: tell it what was held."""
        held, self._held = self._held, None if self._held is None else []
        for one, check in held or ():
            one.keep(check)


def update(
    scaler: DynamicScaler,
    several: Sequence[Gradients],
    flags: list[Flag],
    *,
    held: list[tuple[Gradients, Check]] | None = None,
    together: bool = False,
) -> None:
    """Have a scaler react to the overflow flags of its gradients: at the step, if it has to wait.

    `held` is what `delay_overflow_check` has found; the update waits.
    """
    if together:
        _skip_together(several, scaler, flags)
    known = [one for gradients in several for one in gradients.waiting if one.scaler is scaler]
    waits = held is not None or trains_with_others()
    if not (known or waits):
        scaler.update(flags)
        return
    waiting = known[0] if known else Update(scaler, together)
    waiting.join(several)
    waiting.add(flags)
    if held is not None:
        waiting.hold(held)
    if not waits:
        waiting.make()


def make_updates(gradients: Gradients) -> None:
    """A step begins: bring flags up to date with the gradients, and scalers with the flags."""
    waiting = list(gradients.waiting)
    for one in waiting:
        one.look_again()
    for one in waiting:
        one.make()


def skip_together(several: Sequence[Gradients]) -> None:
    """Gradients of these optimizers are clipped by one norm: an overflow in one has all skip.

    Else the norm, which is inf or NaN, would reach finite gradients, whose step is taken.
    """
    checks = [one.check for one in several if one.check is not None and not one.check.is_used]
    if len(several) > 1 and checks:
        _skip_together(several, checks[0].scaler, [check.found_inf for check in checks])


def _skip_together(several: Sequence[Gradients], scaler: Scaler, flags: list[Flag]) -> None:
    """An overflow in the gradients of one of these optimizers has each of them skip."""
    if flags:
        found = functools.reduce(either, flags)
        for one in several:
            one.note(found, scaler)


def drop_findings(scaler: Scaler, several: Sequence[Gradients]) -> None:
    """Forget what blocks of `scaler` with `delay_overflow_check` have left to the next step.

    A script calls it that decides about the step by itself.  The step then moves no scale; only
    findings of other blocks skip it.
    """
    for one in several:
        one.waiting = [waiting for waiting in one.waiting if waiting.scaler is not scaler]
