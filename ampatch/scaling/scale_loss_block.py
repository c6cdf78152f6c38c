"""The body of `scale_loss`: it scales the loss, checks the passes, and unscales the gradients."""

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
from .delayed import DelayedCheck, leave_scaled, unscale_if_scale_differs, update_now_or_at_step
from .gradients import (
    AppliedScale,
    GradSnapshot,
    GradState,
    OptimizerBlock,
    OptimizerGradients,
    find_owners,
)
from .loss_scaler import DynamicScaler, Scaler
from .optimizer import ManagedOptimizer
from .process_group import trains_with_others
from .scale_value import OverflowFlag

_CORRECT_CALL = (
    "'with ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()', not "
    "loss.backward()."
)
_NOT_OF_SCALED_LOSS_MESSAGE = (
    "ampatch.scale_loss(loss, %s): the block has new gradients that do not come from the scaled "
    "loss. Divided by the loss scale they would be far too small. Write " + _CORRECT_CALL + " Add "
    "another loss to this one first, or give it a block of its own."
)
_REMEDY = (
    "For a loss of several optimizers write one block: 'with ampatch.scale_loss(loss, "
    "[first, second]) as scaled_loss: scaled_loss.backward()'."
)
_OTHER_SCALE_MESSAGE = (
    "ampatch.scale_loss(loss, %s): the block has new gradients of another block's scaled loss, "
    "whose loss scale is %g. This block would divide them by its own scale, %g. " + _REMEDY
)
_SCALED_TWICE_MESSAGE = (
    "ampatch.scale_loss(loss, %s): the loss is the scaled loss of an outer block, so its gradients "
    "are scaled twice. " + _REMEDY
)
_NO_BACKWARD_MESSAGE = (
    "ampatch.scale_loss(loss, %s): the block ended without a backward pass of the scaled loss, so "
    "there are no new gradients. Write " + _CORRECT_CALL
)


def refuse_attribute(block: object, name: str) -> NoReturn:
    """Raise `AttributeError`: the `__getattr__` of blocks, for scripts that use one as the loss."""
    raise AttributeError(
        f"ampatch.scale_loss(...).{name}: scale_loss returns a context manager, which has no "
        f"{name!r}. Write 'with ampatch.scale_loss(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()'."
    )


class PlainBlock:
    """Context manager: yields the loss as it is, and does nothing.

    Not `contextlib.nullcontext(loss)`: Dynamo cannot trace a backward pass inside that.
    """

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss

    def __enter__(self) -> Tensor:
        return self._loss

    def __exit__(self, *exception: object) -> None:
        pass

    __getattr__ = refuse_attribute


class PassCounter:
    """Hook of a scaled loss: counts the backward passes that run through it.

    It refers to no other object: autograd keeps the hook with the graph, and an object here could
    keep the graph alive.
    """

    __torch_unserializable__ = True  # torch pickles a scaled loss without a warning

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, grad: Tensor) -> None:
        self.count += 1


class _ThreadBlocks(threading.local):
    """The open blocks of this thread, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[ScaleLossBlock] = []


_thread_blocks = _ThreadBlocks()


class ScaleLossBlock:
    """Context manager: yields the scaled loss, then unscales the gradients of its backward pass.

    If the block raises (also `KeyboardInterrupt`), the earlier gradients are put back, the new
    gradients are dropped, and the scale does not change.  If the unscaling itself is interrupted,
    the optimizers have no gradients afterwards: some would be scaled and some not.  If
    `KeyboardInterrupt` is raised before `__exit__` begins, the next block puts back the earlier
    gradients.

    `others` are optimizers that are not in the block; if the backward pass reaches them, they log
    an error when they step.  `skips_together`: after an overflow in the gradients of one optimizer,
    all optimizers of the block skip.  `counts_passes`: the scaled loss gets a hook (`PassCounter`),
    so that gradients of another loss are refused.
    """

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[ManagedOptimizer],
        scaler: Scaler,
        delay_unscale: bool,
        delay_overflow_check: bool,
        others: Sequence[ManagedOptimizer],
        skips_together: bool = False,
        counts_passes: bool = True,
    ) -> None:
        self._loss = loss
        self._pass_counter = PassCounter() if counts_passes and loss.requires_grad else None
        self._members: list[OptimizerGradients] = []
        for optimizer in optimizers:
            self._members.append(optimizer.gradients)
        self._other_optimizers: Sequence[tuple[OptimizerGradients, GradSnapshot | None]] = ()
        if others and not scaler.is_one:
            self._other_optimizers = [
                (other.gradients, other.gradients.before_other_block()) for other in others
            ]
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        self._skips_together = skips_together and len(self._members) > 1
        self.scale: Any = None
        self._shared_scale: AppliedScale | None = None
        self._member_blocks: list[OptimizerBlock] = []  # a block for each of `_members`
        self.scaled_loss: Tensor | None = None

    def __enter__(self) -> Tensor:
        try:
            for member in self._members:
                if member.state is GradState.SCALED:
                    unscale_if_scale_differs(member, self._scaler)
                member.before_block()
            with_earlier = [member.params_with_gradients() for member in self._members]
            owner_of = find_owners(self._members)
            scaled_loss, self.scale = self._scaler.scale(self._loss)
            shared_scale = AppliedScale(self._scaler, self.scale, self._scaler.generation)
            # Gradients left scaled by `delay_unscale` now have the scale of this block (see
            # `unscale_if_scale_differs`), so reuse their `AppliedScale`.
            for member in reversed(self._members):
                shared_scale = member.applied_scale or shared_scale
            self._shared_scale = shared_scale
            for member, params in zip(self._members, with_earlier, strict=True):
                self._member_blocks.append(member.begin_block(params, shared_scale, owner_of))
            if self._pass_counter is not None and scaled_loss.requires_grad:
                scaled_loss.register_hook(self._pass_counter)
                self.scaled_loss = scaled_loss
                _thread_blocks.blocks = [
                    *filter(ScaleLossBlock.is_open, _thread_blocks.blocks),
                    self,
                ]
            return scaled_loss
        except BaseException:
            self._abandon()
            raise

    def __exit__(self, error_type: type[BaseException] | None, *rest: object) -> None:
        is_refused = False
        try:
            is_refused = error_type is None and self._has_gradients_of_other_loss()
            if error_type is not None or is_refused:
                self._abandon()
            else:
                self._complete()
        except BaseException:
            for member in self._members:
                member.drop_all()
            raise
        finally:
            self.scaled_loss = None
            _thread_blocks.blocks = [block for block in _thread_blocks.blocks if block is not self]
            for member, before in self._other_optimizers:
                member.after_other_block(before)
        if is_refused:
            raise AmpatchError(_NOT_OF_SCALED_LOSS_MESSAGE % self._names())

    __getattr__ = refuse_attribute

    def is_open(self) -> bool:
        """Whether this block is still the current block of all its optimizers.

        After a `KeyboardInterrupt` a later block may have replaced it.
        """
        return all(
            member.block is block for member, block in zip(self._members, self._member_blocks)
        )

    def snapshot(self) -> BlockSnapshot:
        """The count of passes and the gradients now, before a backward pass."""
        assert self._pass_counter is not None
        return BlockSnapshot(
            self, self._pass_counter.count, [member.snapshot() for member in self._members]
        )

    def has_new_gradients_since(self, before: BlockSnapshot) -> bool:
        """Whether gradients of the block's optimizers have changed since `before`."""
        pairs = zip(self._members, before.member_snapshots, strict=True)
        return any(member.has_changed_since(snapshot) for member, snapshot in pairs)

    def was_reached_since(self, before: BlockSnapshot) -> bool:
        """Whether a backward pass has gone through the block's scaled loss since `before`."""
        return self._pass_counter is not None and self._pass_counter.count > before.pass_count

    def check_foreign_pass(self, reached_blocks: list[ScaleLossBlock]) -> None:
        """Check a pass that changed this block's gradients, but missed its scaled loss; count it.

        `reached_blocks` are the other blocks through whose scaled losses the pass went.  Raises
        `AmpatchError` unless all of them have the scale of this block.
        """
        own_scale, scales = float(self.scale), [float(other.scale) for other in reached_blocks]
        if not scales and own_scale != 1.0:
            raise AmpatchError(_NOT_OF_SCALED_LOSS_MESSAGE % self._names())
        for scale in scales:
            if scale != own_scale:
                raise AmpatchError(_OTHER_SCALE_MESSAGE % (self._names(), scale, own_scale))
        if self._pass_counter is not None:
            self._pass_counter.count += 1  # the pass had the right scale

    def refuse_second_scaling(self, other_blocks: list[ScaleLossBlock]) -> None:
        """Raise `AmpatchError` if a pass from this scaled loss was scaled by `other_blocks` too."""
        if any(float(other.scale) != 1.0 for other in other_blocks):
            raise AmpatchError(_SCALED_TWICE_MESSAGE % self._names())

    def _abandon(self) -> None:
        for member in self._members:
            member.abandon()

    def _has_gradients_of_other_loss(self) -> bool:
        """Whether the block has new gradients, but no pass has reached its scaled loss.

        Warns if there was no pass and there are no new gradients.
        """
        if self._pass_counter is None or self._pass_counter.count:
            return False
        if any(member.has_new_gradients() for member in self._members):
            return float(self.scale) != 1.0
        if torch.is_grad_enabled() and not self._members[0].has_logged_no_backward:
            self._members[0].has_logged_no_backward = True
            logger.warning(_NO_BACKWARD_MESSAGE, self._names())
        return False

    def _names(self) -> str:
        return ", ".join(f"<{type(member.optimizer).__name__}>" for member in self._members)

    def _complete(self) -> None:
        pairs = list(zip(self._members, self._member_blocks, strict=True))
        for member, block in pairs:
            if member.block is not block:
                raise AmpatchError(
                    f"ampatch.scale_loss(..., <{type(member.optimizer).__name__}>): another "
                    "scale_loss block of this optimizer began inside this block, so the "
                    "gradients of this block were dropped. End a block before the next one "
                    "begins; gradients of several blocks add up until the step."
                )
        if self._delay_unscale:
            assert self._shared_scale is not None
            for member, block in pairs:
                leave_scaled(member, block, self._shared_scale)
            return
        scaler = self._scaler
        is_delayed = self._delay_overflow_check
        checks: list[DelayedCheck] = []
        flags: list[OverflowFlag] = []
        for member, block in pairs:
            check = member.after_backward(block, scaler, self.scale, is_delayed=is_delayed)
            if check is not None:
                checks.append(DelayedCheck(member, check))
                flags.append(check.found_inf)
        if not isinstance(scaler, DynamicScaler):
            return
        has_pending = any(member.pending_updates for member in self._members)
        if has_pending or is_delayed or self._skips_together or trains_with_others():
            delayed = checks if is_delayed else None
            update_now_or_at_step(
                scaler, self._members, flags, delayed=delayed, skips_together=self._skips_together
            )
        else:
            scaler.update(flags)


class BlockSnapshot(NamedTuple):
    """The state of an open block at the start of a backward pass."""

    block: ScaleLossBlock
    pass_count: int
    member_snapshots: list[GradSnapshot]


def start_pass_check(root: Any) -> Callable[[], None] | None:
    """Called before a backward pass from `root`, a tensor or a sequence of tensors.

    Returns a check to call after the pass.  Returns None if no block is open, if `root` is the
    scaled loss of the only open block, or if the thread is in another pass.
    """
    blocks = _thread_blocks.blocks
    if not blocks or (len(blocks) == 1 and root is blocks[0].scaled_loss):
        return None
    if current_backward_pass() != -1:
        return None
    snapshots = [block.snapshot() for block in blocks if block.is_open()]
    return functools.partial(_check_pass, root, snapshots)


def _check_pass(root: Any, snapshots: list[BlockSnapshot]) -> None:
    """Raise `AmpatchError` if a block has gradients that do not have its own scale."""
    reached_blocks = [
        before.block for before in snapshots if before.block.was_reached_since(before)
    ]
    for before in snapshots:
        block = before.block
        if root is block.scaled_loss:
            block.refuse_second_scaling([other for other in reached_blocks if other is not block])
        if block not in reached_blocks and block.has_new_gradients_since(before):
            block.check_foreign_pass(reached_blocks)


def with_optimizers_sharing_params(
    optimizers: list[ManagedOptimizer], all_optimizers: Sequence[ManagedOptimizer]
) -> list[ManagedOptimizer]:
    """`optimizers` and all that share a parameter with them, directly or through others."""
    sharing = list(optimizers)
    rest = [optimizer for optimizer in all_optimizers if optimizer not in optimizers]
    new = sharing if rest else []
    while new:
        reached = {id(param) for optimizer in new for param in optimizer.parameters()}
        new = [
            optimizer
            for optimizer in rest
            if not reached.isdisjoint(map(id, optimizer.parameters()))
        ]
        rest = [optimizer for optimizer in rest if optimizer not in new]
        sharing = [*sharing, *new]
    return sharing
