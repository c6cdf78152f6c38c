"""The body of `scale_loss`: what happens before and after the backward pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import AmpatchError
from ..log import logger
from ..torch_private.probes import current_backward_pass
from .delayed import leave_scaled, settle, update
from .gradients import Block, Gradients, Scaled, Seen, State, unscalers_among
from .loss_scaler import DynamicScaler, Scaler
from .optimizer import ManagedOptimizer
from .process_group import trains_with_others

_RIGHT = (
    "'with ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()', not "
    "loss.backward()."
)
_UNSCALED = (
    "ampatch.scale_loss(loss, %s): the block has new gradients that did not come through the "
    "scaled loss. They are not scaled: divided by the loss scale they would be far too small. "
    "Expected a backward pass of what the block yields: " + _RIGHT + " Add another loss to "
    "this one first, or give it a block of its own."
)
_JOINT = (
    "Expected one block for a loss of several optimizers: 'with ampatch.scale_loss(loss, "
    "[first, second]) as scaled_loss: scaled_loss.backward()'."
)
_OTHER_SCALE = (
    "ampatch.scale_loss(loss, %s): the block has new gradients of another block's scaled loss, "
    "under the loss scale %g. This block would divide them by its own, %g. " + _JOINT
)
_TWICE = (
    "ampatch.scale_loss(loss, %s): the loss is the scaled loss of a block around this one, so its "
    "gradients are scaled twice. " + _JOINT
)
_NO_BACKWARD = (
    "ampatch.scale_loss(loss, %s): the block ended without a backward pass of the scaled loss, and "
    "has brought no gradients. Expected a backward pass of what the block yields: " + _RIGHT
)


def refuse_attribute(block: object, name: str) -> NoReturn:
    """`__getattr__` of a block, which a script has taken for the scaled loss."""
    raise AttributeError(
        f"ampatch.scale_loss(...).{name}: scale_loss returns a context manager, which has no "
        f"{name!r}; the scaled loss is what it yields. Write 'with ampatch.scale_loss(loss, "
        "optimizer) as scaled_loss: scaled_loss.backward()'."
    )


class PlainBackward:
    """Context manager: yields the loss as it is, and does nothing.

    Dynamo traces it.  At the backward pass in a `contextlib.nullcontext` of a tensor it fails.
    """

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss

    def __enter__(self) -> Tensor:
        return self._loss

    def __exit__(self, *exception: object) -> None:
        pass

    __getattr__ = refuse_attribute


class Passed:
    """Hook of a scaled loss: how many backward passes have come through it.

    It refers to nothing: autograd keeps it as long as the graph, and would keep the graph with it.
    """

    __torch_unserializable__ = True  # a scaled loss is pickled without a warning

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, grad: Tensor) -> None:
        self.times += 1


class _Here(threading.local):
    """The open blocks of this thread, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[ScaledBackward] = []


_here = _Here()


class ScaledBackward:
    """Context manager: yields the scaled loss, then unscales the gradients it led to.

    If the block raises (Ctrl-C among it), the gradients that were there before it
    are put back, those of a half-done backward pass are dropped, and the scale is
    left alone.  If the unscaling itself is interrupted, the optimizers have no
    gradients afterwards: some would be scaled and some not.  Ctrl-C may strike before
    the end of the block is reached at all: then the next block puts back what there
    was before this one.

    `others` are optimizers that the block was not given; if the backward pass reaches
    them, they log an error when they step.  With `together` an overflow in the
    gradients of one optimizer has all of them skip.
    """

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[ManagedOptimizer],
        scaler: Scaler,
        delay_unscale: bool,
        delay_overflow_check: bool,
        others: Sequence[ManagedOptimizer],
        together: bool = False,
        watches: bool = True,
    ) -> None:
        self._loss = loss
        self._passed = Passed() if watches and loss.requires_grad else None
        self._several: list[Gradients] = []
        for optimizer in optimizers:
            self._several.append(optimizer.gradients)
        self._unscalers = unscalers_among(self._several)
        self._others: Sequence[tuple[Gradients, Any]] = ()
        if others and not scaler.is_one:
            self._others = [(one.gradients, one.gradients.before_others()) for one in others]
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._delay_check = delay_overflow_check
        self._together = together and len(self._several) > 1
        self.scale: Any = None
        self._blocks: list[Block] = []  # one for each of the optimizers
        self.scaled_loss: Tensor | None = None

    def __enter__(self) -> Tensor:
        try:
            for one in self._several:
                if one.state is State.SCALED:
                    settle(one, self._scaler)
                one.gather()
            earlier = [one.with_gradients() for one in self._several]
            scaled, self.scale = self._scaler.scale(self._loss)
            self._scaled = Scaled(self._scaler, self.scale, self._scaler.generation)
            for one in reversed(self._several):  # what waits scaled is at the same scale
                self._scaled = one.scaled or self._scaled
            for one, params in zip(self._several, earlier, strict=True):
                self._blocks.append(one.begin(params, self._scaled, self._unscalers))
            if self._passed is not None and scaled.requires_grad:
                scaled.register_hook(self._passed)
                self.scaled_loss = scaled
                _here.blocks = [*filter(ScaledBackward.is_open, _here.blocks), self]
            return scaled
        except BaseException:
            self._abandon()
            raise

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        is_unscaled = False
        try:
            is_unscaled = kind is None and self._is_unscaled()
            if kind is not None or is_unscaled:
                self._abandon()
            else:
                self._complete()
        except BaseException:
            for one in self._several:
                one.drop()
            raise
        finally:
            self.scaled_loss = None
            _here.blocks = [one for one in _here.blocks if one is not self]
            for one, before in self._others:
                one.after_others(before)
        if is_unscaled:
            raise AmpatchError(_UNSCALED % self._names())

    __getattr__ = refuse_attribute

    def is_open(self) -> bool:
        """Whether the gradients of its optimizers are still its own; Ctrl-C may have ended it."""
        return all(one.block is block for one, block in zip(self._several, self._blocks))

    def look(self) -> Look:
        """What a backward pass may change."""
        assert self._passed is not None
        return Look(self, self._passed.times, [one.seen() for one in self._several])

    def has_new_since(self, look: Look) -> bool:
        """Whether a pass has brought it gradients."""
        seen = zip(self._several, look.seen, strict=True)
        return any(one.has_changed_since(before) for one, before in seen)

    def has_passed_since(self, look: Look) -> bool:
        """Whether a pass has come through its scaled loss."""
        return self._passed is not None and self._passed.times > look.times

    def check_scale(self, through: list[ScaledBackward]) -> None:
        """It has new gradients of a pass through the scaled losses of these other blocks.

        Raises `AmpatchError` unless all of them have its scale.
        """
        own, scales = float(self.scale), [float(one.scale) for one in through]
        if not scales and own != 1.0:
            raise AmpatchError(_UNSCALED % self._names())
        for scale in scales:
            if scale != own:
                raise AmpatchError(_OTHER_SCALE % (self._names(), scale, own))
        if self._passed is not None:
            self._passed.times += 1

    def check_once(self, through: list[ScaledBackward]) -> None:
        """Its scaled loss is the root of a pass, which came through these other blocks' too."""
        if any(float(one.scale) != 1.0 for one in through):
            raise AmpatchError(_TWICE % self._names())

    def _abandon(self) -> None:
        for one in self._several:
            one.abandon()

    def _is_unscaled(self) -> bool:
        """Whether new gradients are not those of the scaled loss; where none came, says so."""
        if self._passed is None or self._passed.times:
            return False
        if any(one.has_new() for one in self._several):
            return float(self.scale) != 1.0
        if torch.is_grad_enabled() and not self._several[0].has_logged_no_backward:
            self._several[0].has_logged_no_backward = True
            logger.warning(_NO_BACKWARD, self._names())
        return False

    def _names(self) -> str:
        return ", ".join(f"<{type(one.optimizer).__name__}>" for one in self._several)

    def _complete(self) -> None:
        blocks = list(zip(self._several, self._blocks, strict=True))
        for one, block in blocks:
            if one.block is not block:
                raise AmpatchError(
                    f"ampatch.scale_loss(..., <{type(one.optimizer).__name__}>): another "
                    "scale_loss block of this optimizer began inside this block, so the "
                    "gradients of this block were dropped. End a block before the next one "
                    "begins; gradients of several blocks add up until the step."
                )
        if self._delay_unscale:
            for one, block in blocks:
                leave_scaled(one, block, self._scaled)
            return
        scaler, found = self._scaler, []
        for one, block in blocks:
            check = one.after_backward(block, scaler, self.scale, is_held=self._delay_check)
            if check is not None:
                found.append((one, check))
        if not isinstance(scaler, DynamicScaler):
            return
        flags = [check.found_inf for _, check in found]
        waiting = [one for one in self._several if one.waiting]
        if waiting or self._delay_check or self._together or trains_with_others():
            held = found if self._delay_check else None
            update(scaler, self._several, flags, held=held, together=self._together)
        else:
            scaler.update(flags)


class Look(NamedTuple):
    """An open block as a backward pass begins."""

    block: ScaledBackward
    times: int
    seen: list[Seen]


def pass_begins(root: Any) -> Callable[[], None] | None:
    """A backward pass begins, from a tensor or several; returns what looks at it when it has ended.

    None: no block is open, or it is the pass of the scaled loss of the only one, or is part of a
    pass that runs.
    """
    blocks = _here.blocks
    if not blocks or (len(blocks) == 1 and root is blocks[0].scaled_loss):
        return None
    if current_backward_pass() != -1:
        return None
    looks = [block.look() for block in blocks if block.is_open()]
    return functools.partial(_pass_ended, root, looks)


def _pass_ended(root: Any, looks: list[Look]) -> None:
    """Raise `AmpatchError` where a block has got gradients that it would not unscale rightly."""
    through = [look.block for look in looks if look.block.has_passed_since(look)]
    for look in looks:
        block = look.block
        if root is block.scaled_loss:
            block.check_once([one for one in through if one is not block])
        if block not in through and block.has_new_since(look):
            block.check_scale(through)


def with_sharers(
    given: list[ManagedOptimizer], everyone: Sequence[ManagedOptimizer]
) -> list[ManagedOptimizer]:
    """`given` and all that share a tensor with them, directly or through others."""
    found, rest = list(given), [one for one in everyone if one not in given]
    new = found if rest else []
    while new:
        reached = {id(param) for one in new for param in one.parameters()}
        new = [one for one in rest if not reached.isdisjoint(map(id, one.parameters()))]
        rest = [one for one in rest if one not in new]
        found = [*found, *new]
    return found
