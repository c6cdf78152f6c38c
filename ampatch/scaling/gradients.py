"""The gradients of one optimizer, from `scale_loss` blocks to the step.

[Note: states of gradients]
`Gradients.state` says what the optimizer's parameters have in `.grad`.

    None    complete gradients, in FP32 and unscaled, or none
    Scaled  gradients that `delay_unscale` left multiplied by one value of the loss scale
    Block   a `scale_loss` block is open, and backward adds scaled gradients.  Earlier gradients are
            in `Block.aside`, complete; or, where `Block.scaled` is set, in `.grad` at that scale

Complete gradients are set aside so that new ones can be unscaled by themselves.  Scaled ones stay
in `.grad`: in the block a script reduces, reads or clips the whole sum.  With several ranks
complete ones stay too, at the scale of the new ones: one all-reduce serves both.

    None, Scaled -> Block   `begin`.  `gather` unscales first if the loss scale has moved
    Block -> None           `after_backward` unscales new gradients and adds earlier ones
    Block -> Scaled         `leave_scaled` (`delay_unscale`)
    Block -> None, Scaled   `abandon`: the block raised, or the next one began before its end
    Scaled -> None          `finish`, before a step or clipping; `zeroed`
    any -> None             `drop`: unscaling was interrupted
    Block -> Block          `zeroed`: no earlier gradients are left

These facts go with each state, but `left_scaled` is false in a Block:

    check    the last look at complete gradients.  None: there was none since they were zeroed.
             `check.found_inf` None: a step has used what was found
             `check.is_old`: they were not zeroed since.  `check.new`: an overflow that came since
    held     findings that wait for the script (`delay_overflow_check`), until `release`
    waiting  updates of loss scalers that wait for the step
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..log import logger
from .loss_scaler import DynamicScaler, Scaler
from .process_group import share_flag, sharers, trains_with_others, world_size
from .scale_value import Flag, either, is_set
from .tensor_lists import drop_grads, grads_of, put_back

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
    """What a look for overflow has found in complete gradients."""

    found_inf: Flag | None
    scaler: Scaler
    is_everyones: bool  # all processes have shared the flag
    is_old: bool = False  # gradients that a step has used are among them
    new: Flag | None = None  # of it: in gradients that have come since


class Seen(NamedTuple):
    """The gradients at one moment, to tell later what has changed."""

    begun_blocks: int
    grads: list[Tensor | None]
    versions: list[int]


@dataclasses.dataclass
class Block:
    """An open `scale_loss` block of one optimizer; see the note of states."""

    unscalers: dict[int, Gradients]
    aside: list[tuple[Tensor, Tensor]]  # parameters and their earlier gradients
    scaled: Scaled | None
    before: Seen | None = None  # the earlier gradients, where they stay in `.grad`


class Gradients:
    """The gradients of `optimizer`, and what blocks, steps and zeroes do to them.

    The ranks of `process_group` share their overflow flag in each block.  Where the optimizers of a
    block share parameters, one of them scales and unscales a gradient (`unscalers_among`).
    """

    def __init__(self, optimizer: Any, process_group: Any = None) -> None:
        self.optimizer = optimizer
        self.state: Scaled | Block | None = None
        self.check: Check | None = None
        self.held: list[tuple[Flag, Scaler, bool]] = []
        self.waiting: list[Deferred] = []
        self.left_scaled = False  # a block for other optimizers has added scaled gradients
        self.had_block = False  # since the last step
        self.begun_blocks = 0
        self.has_logged_no_backward = False
        self._has_logged_graph = False
        self._process_group = process_group

    @property
    def block(self) -> Block | None:
        """The open block."""
        return self.state if isinstance(self.state, Block) else None

    def parameters(self) -> Sequence[Tensor]:
        """The tensors the optimizer updates.  A single group's own list: do not change it."""
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(param.grad is not None for param in self.parameters())

    # A block

    def gather(self, scaler: Scaler) -> None:
        """Bring the gradients up to date before a block.

        Gradients that wait scaled are unscaled, unless new ones of `scaler` may be added to them.
        A block that was interrupted before its end is abandoned.
        """
        self.abandon()
        if isinstance(self.state, Scaled) and not self.state.takes(scaler):
            self.finish()
        self.report_left_scaled()
        self.had_block = True
        if self.check is not None and self.check.found_inf is None:
            self.look_again()

    def begin(self, held: list[Tensor], shared: Scaled, unscalers: dict[int, Gradients]) -> Block:
        """Open a block: the gradients of `held` are set aside, or scaled and left in `.grad`."""
        if not held:
            self.check = self.state = None
            self.held.clear()
        scaled = self.state if isinstance(self.state, Scaled) else None
        stays = bool(held) and (scaled is not None or world_size() > 1)
        held = self._own(held, unscalers)
        aside = [] if stays else list(zip(held, map(_grad_of, held), strict=True))
        self.state = block = Block(unscalers, aside, scaled)  # `abandon` puts these back
        self.begun_blocks += 1
        if stays and scaled is None:
            shared.scale_up(list(map(_grad_of, held)))
            block.scaled = shared.joined(self)
        block.before = self.seen() if stays else None
        for param, _ in aside:  # so that what backward adds can be unscaled by itself
            param.grad = None
        return block

    def has_new(self) -> bool:
        """Whether the open block has brought gradients, or has changed earlier ones."""
        before = self.block and self.block.before
        return self.has_changed_since(before) if before else self.has_gradients()

    def after_backward(self, block: Block, scaler: Scaler, scale: Any, holds: bool) -> Flag | None:
        """Unscale the new gradients and add them to the earlier ones; returns found_inf.

        `holds`: an overflow is not noted for the step until `release`.
        """
        block.scaled = None
        found = self.unscale(scaler, scale, block.unscalers, holds)
        self.state = None
        if block.aside:
            put_back(block.aside)
        return found

    def leave_scaled(self, block: Block, shared: Scaled) -> None:
        """`delay_unscale`: scale earlier gradients as those of the block, and leave all scaled."""
        self.state = block.scaled
        shared.scale_up([grad for _, grad in block.aside])
        put_back(block.aside)
        self.state = shared.joined(self)

    def abandon(self) -> None:
        """The backward pass failed: drop its gradients, put back the earlier ones."""
        if (block := self.block) is None:
            return
        if block.scaled is not None:
            logger.warning(
                "%s: an ampatch.scale_loss block has raised, and earlier gradients were in p.grad "
                "for its backward pass to add to (delay_unscale=True, or several ranks). What it "
                "added stays there, as in a training without ampatch. optimizer.zero_grad() drops "
                "the gradients of all micro-batches.",
                type(self.optimizer).__name__,
            )
        else:
            drop_grads(self._own(self.parameters(), block.unscalers))
            for param, grad in block.aside:
                param.grad = grad
        self.state = block.scaled

    def drop(self) -> None:
        """Drop all gradients, also those set aside: some may be unscaled and some not."""
        self.state = None
        drop_grads(self.parameters())
        self.zeroed()

    # Unscaling

    def unscale(
        self, scaler: Scaler, scale: Any, unscalers: dict[int, Gradients], holds: bool = False
    ) -> Flag | None:
        """Unscale the gradients and look for overflow; returns found_inf, None: unchecked.

        Gradients that an earlier optimizer of the block has unscaled are only checked.
        """
        params = self.parameters()
        own = self._own(params, unscalers) if unscalers else params
        found = self._unscale(scaler, grads_of(own), scale, holds)
        if len(own) < len(params):
            shared = [param for param in params if unscalers.get(id(param), self) is not self]
            self._unscale(scaler, grads_of(shared), scale / scale, holds)
        return found

    def _unscale(self, scaler: Scaler, grads: list[Any], scale: Any, holds: bool) -> Flag | None:
        if not (grads or self._process_group):
            return None  # there is nothing to learn for the scale
        if True in map(_has_graph, grads) and not self._has_logged_graph:
            self._has_logged_graph = True
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

    def _own(self, params: Sequence[Tensor], unscalers: dict[int, Gradients]) -> list[Tensor]:
        """The `params` whose gradients this optimizer scales and unscales."""
        return [param for param in params if unscalers.get(id(param), self) is self]

    def note(self, found: Flag, scaler: Scaler, is_everyones: bool = False) -> None:
        """Remember an overflow flag until the step."""
        before, is_old, new = self.check, False, found
        if before is not None and before.found_inf is not None:
            scaler = before.scaler if before.found_inf is True else scaler
            found = either(before.found_inf, found)
            is_everyones = is_everyones and before.is_everyones
            is_old, new = before.is_old, new if before.new is None else either(before.new, new)
        self.check = Check(found, scaler, is_everyones, is_old, new)

    def finish(self) -> None:
        """Unscale what `delay_unscale` left scaled, unless a block is open."""
        if isinstance(self.state, Scaled):
            self.state.finish()

    def look_again(self) -> Flag | None:
        """Look for overflow once more, where gradients may have changed since their block ended.

        A step has used them and they were not zeroed: an inf may be left.  Or several processes
        train: a script may have averaged the inf of another rank into them.  Returns found_inf;
        None: there was nothing to look for.
        """
        check = self.check
        if check is None or self.state is not None:
            return None
        if check.found_inf is not None and (check.is_everyones or not trains_with_others()):
            return None
        if not self.has_gradients():
            if check.found_inf is None:
                self.check = None
            return None
        scale, is_used = check.scaler.peek(), check.found_inf is None
        found = self.unscale(check.scaler, scale / scale, {})  # 1, where the scale lives
        if is_used and self.check is not None:
            self.check.is_old, self.check.new = True, None
        return found

    def is_left_over(self) -> bool:
        """Whether a step was skipped for gradients of an earlier one alone, which were not zeroed.

        Several ranks cannot tell: there gradients add up in place.  Waits for the device.
        """
        check = self.check
        if check is None or not check.is_old:  # before a wait
            return False
        return check.new is None or not is_set(check.new)

    # Steps and zeroes

    def take_found_inf(self) -> Flag | None:
        """The overflow flag of the present gradients, for a step; None: nothing was checked."""
        if self.check is not None and self.check.found_inf is None:
            self.look_again()
        if self.check is None:
            return None
        found, self.check.found_inf = self.check.found_inf, None
        return found if self.has_gradients() else None  # gradients set to None: no overflow either

    def zeroed(self) -> None:
        """All gradients were zeroed: nothing waits, no overflow is remembered."""
        self.check, self.left_scaled = None, False
        self.held.clear()
        if (block := self.block) is None:
            self.state = None
            return
        block.aside, block.scaled = [], None
        if block.unscalers:  # others in the block may have set aside gradients of these tensors
            zeroed = set(map(id, self.parameters()))
            for one in dict.fromkeys(block.unscalers.values()):
                one.zeroed_by_others(zeroed)

    def zeroed_by_others(self, zeroed: set[int]) -> None:
        """Gradients of these parameters (ids) were zeroed; if none is left, forget an overflow."""
        if (block := self.block) is not None:
            block.aside = [(param, grad) for param, grad in block.aside if id(param) not in zeroed]
            if block.aside:
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
        if self.block is not None:
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
        return self.seen() if self.block is None else None

    def after_others(self, before: Seen | None) -> None:
        """A block for another optimizer has ended: note if it changed this one's gradients.

        Changes by a block of this optimizer's own do not count.
        """
        if before is None or self.block is not None or self.begun_blocks != before.begun_blocks:
            return
        self.left_scaled |= self.has_changed_since(before)

    def seen(self) -> Seen:
        """The gradients as they are now, for `has_changed_since`."""
        grads = list(map(_grad_of, self.parameters()))
        versions = [-1 if grad is None else grad._version for grad in grads]
        return Seen(self.begun_blocks, grads, versions)

    def has_changed_since(self, before: Seen) -> bool:
        """Whether a gradient is another one, or has been written into."""
        _, grads, versions = self.seen()
        return versions != before.versions or not all(map(operator.is_, before.grads, grads))

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


def unscalers_among(several: Sequence[Gradients]) -> dict[int, Gradients]:
    """Maps ids of tensors to the first optimizer that holds each; {} where none is shared.

    The first alone scales and unscales a gradient.  An overflow in it makes all holders skip.
    """
    if len(several) < 2:
        return {}
    holders = [(id(param), one) for one in several for param in one.parameters()]
    unscalers = dict(reversed(holders))
    return unscalers if len(unscalers) < len(holders) else {}


class Scaled:
    """Gradients of some optimizers that `delay_unscale` left multiplied by one loss scale.

    They are unscaled together: the scaler counts one step for all optimizers that a loss reaches.
    """

    def __init__(self, scaler: Scaler, scale: Any) -> None:
        self._scaler = scaler
        self._generation = scaler.generation
        self._scale = scale
        self._several: list[Gradients] = []

    def joined(self, one: Gradients) -> Scaled:
        """Count an optimizer's gradients among these; returns these."""
        if one not in self._several:
            self._several.append(one)
        return self

    def scale_up(self, grads: list[Any]) -> None:
        """Bring complete gradients to the scale of these, in place."""
        self._scaler.scale_grads_(grads, self._scale)

    def takes(self, scaler: Scaler) -> bool:
        """Whether new gradients of `scaler` may be added: it has not moved since."""
        return self._scaler is scaler and self._generation == scaler.generation

    def finish(self) -> None:
        """Unscale the gradients, and let the scaler know.

        An optimizer in a block of its own keeps its gradients, which its block unscales.
        """
        waiting = [one for one in self._several if one.state is self]
        unscalers = unscalers_among(waiting)
        flags = []
        try:
            for one in waiting:
                one.state = None
                found = one.unscale(self._scaler, self._scale, unscalers)
                flags += [] if found is None else [found]
        except BaseException:  # some are unscaled and some not
            for one in waiting:
                one.drop()
            raise
        update_scaler(self._scaler, flags, waiting)


class Deferred:
    """A scaler's update, with its overflow flags.  It waits for the first step of some optimizers.

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
        flags = [found for one in self._several if (found := one.look_again()) is not None]
        self.add(flags)
        if self._together:
            _skip_together(self._several, self.scaler, flags)

    def update(self) -> None:
        """The scaler reacts to the flags that were kept: the first optimizer steps."""
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

    With several processes it reacts at the step.  In DDP's `no_sync` one rank alone may see an inf;
    at the step all ranks have seen it.
    """
    if not isinstance(scaler, DynamicScaler):
        return
    if together:
        _skip_together(several, scaler, flags)
    known = next((held for one in several for held in one.waiting if held.scaler is scaler), None)
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
        _skip_together(several, checks[0].scaler, flags)


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
        one.waiting = [deferred for deferred in one.waiting if deferred.scaler is not scaler]
        one.held = [held for held in one.held if held[1] is not scaler]
