"""The gradients of one optimizer, from `scale_loss` blocks to the step.  Are they scaled?

Outside a block they are complete, in FP32 and unscaled, or they wait scaled (`delay_unscale`):
`Gradients.scaled` says which.  When a block begins, complete gradients are set aside, so that what
backward adds can be unscaled by itself; then both are added up.  Gradients that wait scaled stay in
`.grad`, where backward adds to them, so that what a script reduces, reads or clips in the block is
the whole sum.  With several ranks complete ones stay too, at the scale of the new ones: one
all-reduce serves both.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..log import logger
from .loss_scaler import DynamicScaler, Scaler
from .process_group import share_flag, sharers, trains_with_others, world_size
from .scale_value import Flag, either, is_set
from .tensor_lists import drop_grads, grads_of, put_back, with_grads

Seen = tuple[int, list[Tensor | None], list[int]]

_grad_of = operator.attrgetter("grad")
_has_graph = operator.attrgetter("requires_grad")
_OF_A_GRAPH = (
    "%s: gradients have a graph (backward(create_graph=True)) of the loss times the loss scale. "
    "They are unscaled, and their graph is not: a second derivative by p.grad is multiplied by the "
    "loss scale. Take torch.autograd.grad(loss, parameters, create_graph=True) of the loss itself, "
    "or loss_scale=1."
)


@dataclasses.dataclass
class Check:
    """The result of a look for overflow in complete gradients.

    `found_inf` is None once a step has used the gradients, since the script may change them
    afterwards.
    """

    found_inf: Flag | None = None
    scaler: Scaler | None = None
    is_everyones: bool = False  # the flag has been shared by all processes


class Gradients:
    """The gradients of `optimizer`, and what blocks, steps and zeroes do to them.

    The ranks of `process_group` share their overflow flag in each block.  Where the optimizers of a
    block share parameters, `owners` says which of them scales and unscales a gradient
    (`owners_among`).
    """

    def __init__(self, optimizer: Any, process_group: Any = None) -> None:
        self.optimizer = optimizer
        self.scaled: Scaled | None = None  # set while the gradients wait, multiplied by that scale
        self.aside: list[tuple[Tensor, Tensor]] | None = (
            None  # in a block: parameters and earlier gradients
        )
        self._owners: dict[int, Gradients] = {}  # in a block
        self._before: Seen | None = None  # in a block that adds to gradients in `.grad`
        self.check: Check | None = None  # None: no look since they were zeroed
        self.waiting: list[Deferred] = []  # updates of scalers that wait for the step
        # What blocks with `delay_overflow_check` have found: the script may decide by itself.
        self.held: list[tuple[Flag, Scaler, bool]] = []
        self.had_block = False  # since the last step
        self.left_scaled = False  # a block for others has added scaled ones
        self._process_group = process_group
        self._has_warned = False  # of gradients with a graph
        self.lacked_backward = False  # a block had none, which has been logged
        self.blocks = 0  # that have begun

    def parameters(self) -> Sequence[Tensor]:
        """The tensors the optimizer updates; of a single group its own list, for reading."""
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        for param in self.parameters():
            if param.grad is not None:
                return True
        return False

    # A block

    def gather(self, scaler: Scaler) -> list[Tensor]:
        """Bring the gradients up to date before a block; returns the parameters that have some.

        Gradients that wait scaled are unscaled, unless new ones of `scaler` may be added to them.
        A block that was interrupted before its end is abandoned.
        """
        self.abandon()
        if self.scaled is not None and not self.scaled.takes(scaler):
            self.finish()
        if self.left_scaled:
            self.report_left_scaled()
        self.had_block = True
        if self.check is not None and self.check.found_inf is None:
            self.look_again()
        return with_grads(self.parameters())

    def make_room(self, held: list[Tensor], block: Scaled, owners: dict[int, Gradients]) -> None:
        """Begin the block: the gradients of `held` are set aside, or scaled and left in `.grad`."""
        aside: list[tuple[Tensor, Tensor]] = []
        stays = False
        if held:
            held = self._owned(held, owners)
            stays = self.scaled is not None or world_size() > 1
            if not stays:
                aside = list(zip(held, map(_grad_of, held), strict=True))
        else:
            self.check = self.scaled = None
            self.held.clear()
        self._owners = owners
        self.aside = aside  # from here on `abandon` puts these back
        self.blocks += 1
        if stays and self.scaled is None:
            block.scale_up(list(map(_grad_of, held)))
            block.join(self)
        self._before = self._seen() if stays else None
        for param, _ in aside:  # so that what backward adds can be unscaled by itself
            param.grad = None

    def has_new(self) -> bool:
        """Whether the block that runs has brought gradients, or has changed earlier ones."""
        if self._before is None:
            return self.has_gradients()
        return self._has_changed_since(self._before)

    def after_backward(self, scaler: Scaler, scale: Any, holds: bool = False) -> Flag | None:
        """Unscale the new gradients and add them to the earlier ones; returns found_inf.

        `holds`: an overflow is not noted for the step until `release`.
        """
        found = self.unscale(scaler, scale, self._owners, holds)
        aside = self._end_block()
        if aside:
            put_back(aside)
        return found

    def leave_scaled(self, block: Scaled) -> None:
        """`delay_unscale`: scale earlier gradients as those of the block, and leave all scaled."""
        aside = self._end_block() or []
        block.scale_up([grad for _, grad in aside])
        put_back(aside)
        block.join(self)

    def _end_block(self) -> list[tuple[Tensor, Tensor]] | None:
        aside, self.aside, self._owners, self._before = self.aside, None, {}, None
        return aside

    def abandon(self) -> None:
        """The backward pass failed: drop its gradients, put back the earlier ones.

        Where backward added to earlier gradients, what it added stays in them, which is logged.
        """
        if self.aside is None:
            return
        if self.scaled is not None:
            logger.warning(
                "%s: an ampatch.scale_loss block has raised, and earlier gradients were in p.grad "
                "for its backward pass to add to (delay_unscale=True, or several ranks). What it "
                "added stays there, as in a training without ampatch. optimizer.zero_grad() drops "
                "the gradients of all micro-batches.",
                type(self.optimizer).__name__,
            )
        else:
            drop_grads(self._owned(self.parameters(), self._owners))
            for param, grad in self.aside:
                param.grad = grad
        self._end_block()

    def drop(self) -> None:
        """Drop all gradients, also those set aside: some may be unscaled and some not."""
        self._end_block()
        drop_grads(self.parameters())
        self.zeroed()

    # Unscaling

    def unscale(
        self, scaler: Scaler, scale: Any, owners: dict[int, Gradients], holds: bool = False
    ) -> Flag | None:
        """Unscale the gradients and look for overflow; returns found_inf, None: unchecked.

        Gradients that an earlier optimizer of the block has unscaled are only checked.
        """
        self.scaled = None
        if not owners:
            return self._unscale(scaler, grads_of(self.parameters()), scale, holds)
        params = self.parameters()
        own = self._owned(params, owners)
        found = self._unscale(scaler, grads_of(own), scale, holds)
        if len(own) < len(params):
            shared = [param for param in params if owners.get(id(param), self) is not self]
            self._unscale(scaler, grads_of(shared), scale / scale, holds)
        return found

    def _unscale(self, scaler: Scaler, grads: list[Any], scale: Any, holds: bool) -> Flag | None:
        if not (grads or self._process_group):
            return None  # there is nothing to learn for the scale
        if True in map(_has_graph, grads) and not self._has_warned:
            self._has_warned = True
            logger.warning(_OF_A_GRAPH, type(self.optimizer).__name__)
        found = scaler.unscale_(grads, scale)
        if found is None:
            return None
        groups, are_all = sharers(self._process_group, grads)
        if groups:
            found = share_flag(found, groups, grads)
        if holds:
            self.held.append((found, scaler, are_all))
        else:
            self.note(found, scaler, are_all)
        return found

    def release(self) -> None:
        """Note for the step what was held: the script has not decided by itself."""
        while self.held:
            self.note(*self.held.pop())

    def _owned(self, params: Sequence[Tensor], owners: dict[int, Gradients]) -> list[Tensor]:
        """Those of `params` whose gradients this optimizer scales and unscales."""
        return [param for param in params if owners.get(id(param), self) is self]

    def note(self, found: Flag, scaler: Scaler, is_everyones: bool = False) -> None:
        """Remember an overflow flag until the step."""
        before = self.check
        if before is not None and before.found_inf is not None:
            scaler = before.scaler if before.found_inf is True and before.scaler else scaler
            found = either(before.found_inf, found)
            is_everyones = is_everyones and before.is_everyones
        self.check = Check(found, scaler, is_everyones)

    def finish(self) -> None:
        """Unscale what `delay_unscale` left scaled, unless a block is open."""
        if self.scaled is not None and self.aside is None:
            self.scaled.finish()

    def look_again(self) -> Flag | None:
        """Look for overflow once more, where gradients may have changed since their block ended.

        A step has used them and they were not zeroed: an inf may be left.  Or several processes
        train: a script may have averaged the inf of another rank into them.  Returns found_inf;
        None: there was nothing to look for.
        """
        check = self.check
        if check is None or self.scaled is not None or self.aside is not None:
            return None
        if check.found_inf is not None and (check.is_everyones or not trains_with_others()):
            return None
        if check.scaler is None or not self.has_gradients():
            if check.found_inf is None:
                self.check = None
            return None
        scale = check.scaler.peek()
        return self.unscale(check.scaler, scale / scale, {})  # 1, where the scale lives

    # Steps and zeroes

    def take_found_inf(self) -> Flag | None:
        """The overflow flag of the present gradients, for a step; None: nothing was checked."""
        if self.check is not None and self.check.found_inf is None:
            self.look_again()
        if self.check is None:
            return None
        found, self.check.found_inf = self.check.found_inf, None
        return found if self.has_gradients() else None  # gradients set to None: no overflow either

    def take_overflow(self) -> bool:
        """Whether the gradients gathered since the last look overflowed.  Waits for the device."""
        found = self.take_found_inf()
        return found is not None and is_set(found)

    def zeroed(self) -> None:
        """All gradients were zeroed: nothing waits, no overflow is remembered."""
        self.check = self.scaled = None
        self.held.clear()
        self.left_scaled = False
        if self.aside is not None:
            self.aside = []
        if self._owners:  # others in the block may have set aside gradients of these tensors
            zeroed = set(map(id, self.parameters()))
            for owner in {id(one): one for one in self._owners.values()}.values():
                owner.zeroed_by_others(zeroed)

    def zeroed_by_others(self, zeroed: set[int]) -> None:
        """Gradients of these parameters (ids) were zeroed; if none is left, forget an overflow."""
        if self.aside:
            self.aside = [(param, grad) for param, grad in self.aside if id(param) not in zeroed]
        if self.aside:
            return
        if all(param.grad is None or id(param) in zeroed for param in self.parameters()):
            self.check, self.left_scaled = None, False
            self.held.clear()

    def ready(self, wanted: set[int]) -> bool:
        """Gradients of these tensors (ids) are about to be clipped: leave none scaled.

        Returns whether there are such gradients, outside of a block.
        """
        if not any(id(param) in wanted for param in self.parameters()):
            return False
        if self.aside is not None:
            logger.error(
                "%s: gradients are clipped inside its ampatch.scale_loss block, where they are "
                "still scaled. Clip them after the block.",
                type(self.optimizer).__name__,
            )
            return False
        self.finish()
        found = self.look_again()  # clipping may hide what another rank's inf has left
        if found is not None:
            for deferred in self.waiting:
                deferred.add([found])
        return True

    # Blocks for other optimizers.  A GAN leaves scaled gradients on purpose, and zeroes them.

    def before_others(self) -> Seen | None:
        """A block for another optimizer begins: the gradients as they are now, for `after_others`.

        None: this optimizer is in a block of its own, in another thread.
        """
        seen = self._seen()
        return seen if self._is_outside(seen[0]) else None

    def after_others(self, before: Seen | None) -> None:
        """That block has ended: note if its backward pass has changed gradients of this optimizer.

        Changes by a block of this optimizer's own do not count.
        """
        if before is None:
            return
        if self._has_changed_since(before) and self._is_outside(before[0]):
            self.left_scaled = True

    def _is_outside(self, blocks: int) -> bool:
        """Whether no block of this optimizer is open or has begun since there were `blocks`."""
        return self.aside is None and self.blocks == blocks

    def _seen(self) -> Seen:
        """Number of blocks, gradients and their versions, to tell later what has changed."""
        grads = list(map(_grad_of, self.parameters()))
        return self.blocks, grads, [-1 if grad is None else grad._version for grad in grads]

    def _has_changed_since(self, before: Seen) -> bool:
        _, grads, versions = self._seen()
        return versions != before[2] or not all(map(operator.is_, before[1], grads))

    def report_left_scaled(self) -> None:
        """Log an error if such gradients are about to be used."""
        if self.left_scaled and self.has_gradients():
            logger.error(
                "%s: gradients are used that an ampatch.scale_loss block left scaled, because it "
                "was not given this optimizer. Pass every optimizer the loss reaches, "
                "scale_loss(loss, [first, second]), or zero_grad() this one before its own block.",
                type(self.optimizer).__name__,
            )
        self.left_scaled = False


def owners_among(several: Sequence[Gradients]) -> dict[int, Gradients]:
    """By id of each tensor, the first optimizer that holds it; {} where none is shared.

    The first alone scales and unscales its gradient; an overflow in it concerns all holders.
    """
    if len(several) < 2:
        return {}
    holders = [(id(param), one) for one in several for param in one.parameters()]
    owners = dict(reversed(holders))
    return owners if len(owners) < len(holders) else {}


class Scaled:
    """Gradients that `delay_unscale` left scaled by one value of a scaler, of some optimizers.

    They are unscaled together, so that the scaler counts one step however many optimizers a loss
    reaches.
    """

    def __init__(self, scaler: Scaler, scale: Any) -> None:
        self._scaler = scaler
        self._generation = scaler.generation
        self._scale = scale
        self._several: list[Gradients] = []

    def join(self, one: Gradients) -> None:
        """Count an optimizer's gradients among these."""
        one.scaled = self
        if one not in self._several:
            self._several.append(one)

    def scale_up(self, grads: list[Any]) -> None:
        """Bring complete gradients to the scale of these, in place."""
        self._scaler.scale_grads_(grads, self._scale)

    def takes(self, scaler: Scaler) -> bool:
        """Whether new gradients of `scaler` may be added: it has not moved since."""
        return self._scaler is scaler and self._generation == scaler.generation

    def finish(self) -> None:
        """Unscale the gradients, and let the scaler know.

        Those of an optimizer in a block of its own stay: its block unscales them.
        """
        waiting = [one for one in self._several if one.scaled is self and one.aside is None]
        owners = owners_among(waiting)
        found = []
        try:
            for one in waiting:
                found.append(one.unscale(self._scaler, self._scale, owners))
        except BaseException:  # some are unscaled and some not
            for one in waiting:
                one.drop()
            raise
        update_scaler(self._scaler, [flag for flag in found if flag is not None], waiting)


class Deferred:
    """A scaler's update that waits for the first step of some optimizers, with its overflow flags.

    `together`: an overflow in the gradients of one optimizer has all of them skip.
    """

    def __init__(self, scaler: DynamicScaler, together: bool) -> None:
        self.scaler = scaler
        self.is_delayed = False  # by `delay_overflow_check`
        self._together = together
        self._several: list[Gradients] = []
        self._found: Flag | None = None  # None: there is nothing to learn

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

    def look_again(self) -> None:
        """Look for overflow in all gradients once more, before the first step."""
        for one in self._several:
            one.release()
        found = [one.look_again() for one in self._several]
        flags = [flag for flag in found if flag is not None]
        self.add(flags)
        if self._together:
            _skip_together(self._several, self.scaler, flags)

    def update(self) -> None:
        """The first of the optimizers steps: the scaler reacts to the flags that were kept."""
        for one in self._several:
            one.release()
            one.waiting = [deferred for deferred in one.waiting if deferred is not self]
        self.scaler.update([] if self._found is None else [self._found])
        self.scaler.has_reacted_unasked = self.is_delayed


def update_scaler(
    scaler: Scaler,
    flags: list[Flag],
    several: Sequence[Gradients],
    *,
    at_step: bool = False,
    together: bool = False,
) -> None:
    """Have a scaler react to the overflow flags of its gradients, now or at the step.

    Where several processes train it is always at the step: in DDP's `no_sync`
    one rank alone may see an inf, at the step all have seen it.
    """
    if not isinstance(scaler, DynamicScaler):
        return
    if together:
        _skip_together(several, scaler, flags)
    known: Deferred | None = None
    for one in several:
        for deferred in one.waiting:
            if known is None and deferred.scaler is scaler:
                known = deferred
    waits = at_step or trains_with_others()
    if known is None and not waits:
        scaler.update(flags)
        return
    known = known or Deferred(scaler, together)
    known.join(several)
    known.add(flags)
    known.is_delayed |= at_step
    if not waits:
        known.update()


def skip_together(several: Sequence[Gradients]) -> None:
    """Gradients of these optimizers are clipped by one norm: an overflow in one has all skip.

    Else the norm, which is inf or NaN, would reach finite gradients, whose step is taken.
    """
    checks = [one.check for one in several if one.check is not None]
    flags = [check.found_inf for check in checks if check.found_inf is not None]
    if len(several) > 1 and flags:
        found = functools.reduce(either, flags)
        scalers = [check.scaler for check in checks if check.scaler is not None]
        for one in several if scalers else ():
            one.note(found, scalers[0])


def _skip_together(several: Sequence[Gradients], scaler: Scaler, flags: list[Flag]) -> None:
    """An overflow in the gradients of one of these optimizers has each of them skip."""
    if flags:
        found = functools.reduce(either, flags)
        for one in several:
            one.note(found, scaler)


def drop_findings(scaler: Scaler, several: Sequence[Gradients]) -> None:
    """Forget what blocks of `scaler` with `delay_overflow_check` have left to the next step.

    For a script that looks for overflow and decides about the step by itself: the step moves no
    scale, and is skipped only by what other blocks have found.
    """
    for one in several:
        one.waiting = [deferred for deferred in one.waiting if deferred.scaler is not scaler]
        one.held = [held for held in one.held if held[1] is not scaler]
