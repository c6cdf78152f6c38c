"""The gradients of one optimizer, from `scale_loss` blocks to the step.

[Note: states of gradients]
`OptimizerGradients.state` says what the optimizer's parameters have in `.grad`.

    NOT_SCALED  no gradients, or complete gradients without a check: from outside of blocks, of a
                static scale, or of `delay_overflow_check`, whose check comes at the step
    SCALED      gradients multiplied by a loss scale: a `scale_loss` block is open (`block` is set),
                or a block with `delay_unscale` has ended (`applied_scale` is set)
    UNSCALED    complete gradients of blocks, divided by the loss scale, and no skip is pending:
                they were finite, or a step has consumed their `check`
    FOUND_INF   as UNSCALED, but the next step may skip: `check.found_inf` is True, or a device
                tensor that can be 0

    any but SCALED -> SCALED          `begin_block`: a block opens
    SCALED -> any but SCALED          `after_backward`; for gradients of `delay_unscale`
                                      `delayed.unscale_delayed`, before a step or clipping
    SCALED -> the state before        `abandon`: the block raised, or the next one began.  Earlier
                                      gradients that were scaled in `.grad` stay SCALED
    NOT_SCALED -> UNSCALED            `keep_check`, `keep_flag`, as in the next row
    NOT_SCALED, UNSCALED -> FOUND_INF `keep_check`: a check of `delay_overflow_check`, at the step;
                                      `keep_flag`: the flag of optimizers that skip together
    UNSCALED -> FOUND_INF             `recheck`: an inf that is left over or averaged in
    UNSCALED -> NOT_SCALED            `recheck`: the gradients that a step has used are gone
    FOUND_INF -> UNSCALED             `take_found_inf`: a step, taken or skipped
    any -> NOT_SCALED                 `on_zero_grad`, outside of blocks; `on_zeroed_elsewhere`, but
                                      not from SCALED; `drop_all`: unscaling was interrupted

During a block, `OptimizerBlock.saved_grads` holds the complete gradients of earlier blocks in place
of `.grad`, so that the new gradients can be unscaled by themselves.  With several ranks, the
earlier gradients stay in `.grad`, multiplied by the new scale, because one all-reduce serves both.
Scaled earlier gradients stay in `.grad` too, because in a block the script reduces, reads or clips
the sum.

If optimizers of a block share a parameter, the first of the block's members that has it is the
owner of its gradient: only the owner scales and unscales it.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..log import logger
from .loss_scaler import Scaler
from .process_group import flag_groups, share_flag, trains_with_others, world_size
from .scale_value import OverflowFlag, combine_flags, is_set
from .unscaling import add_back

_grad_of = operator.attrgetter("grad")
_has_graph = operator.attrgetter("requires_grad")
_GRAPH_MESSAGE = (
    "%s: gradients were made with backward(create_graph=True). ampatch unscales them, but their "
    "graph still contains the loss scale, so second derivatives through p.grad are multiplied by "
    "it. Use torch.autograd.grad(loss, parameters, create_graph=True) on the unscaled loss, or "
    "loss_scale=1."
)


class GradState(enum.Enum):
    """What `.grad` of an optimizer's parameters holds; see the note of states."""

    NOT_SCALED = enum.auto()
    SCALED = enum.auto()
    UNSCALED = enum.auto()
    FOUND_INF = enum.auto()


@dataclasses.dataclass
class OverflowCheck:
    """The result of a check of complete gradients for overflow."""

    found_inf: OverflowFlag
    scaler: Scaler
    is_all_reduced: bool  # all processes share the flag
    # The flag of gradients that are newer than the last step; None: there are no such gradients.
    found_inf_since_step: OverflowFlag | None
    includes_used: bool = False  # a step has already used some of these gradients: see `recheck`
    is_consumed: bool = False  # a step has read the flag

    def merged_with(self, earlier: OverflowCheck) -> OverflowCheck:
        """One check for this one and an earlier check of the same gradients."""
        if earlier.is_consumed:
            return self
        scaler = earlier.scaler if earlier.found_inf is True else self.scaler
        is_all_reduced = self.is_all_reduced and earlier.is_all_reduced
        new = self.found_inf_since_step
        if new is not None and earlier.found_inf_since_step is not None:
            new = combine_flags(earlier.found_inf_since_step, new)
        found_inf = combine_flags(earlier.found_inf, self.found_inf)
        return OverflowCheck(found_inf, scaler, is_all_reduced, new, earlier.includes_used)


class GradSnapshot(NamedTuple):
    """The gradients of an optimizer at one moment, to tell later whether they have changed."""

    block_count: int
    grads: list[Tensor | None]
    versions: list[int]


@dataclasses.dataclass
class OptimizerBlock:
    """An open `scale_loss` block of one optimizer; see the note of states."""

    # By parameter id: the owner of its gradient; {} if the members share no parameter.
    owner_of: dict[int, OptimizerGradients]
    saved_grads: list[tuple[Tensor, Any]]  # parameters, and their earlier gradients
    earlier_snapshot: GradSnapshot | None = None  # the earlier gradients, if they stay in `.grad`


@dataclasses.dataclass(eq=False)
class AppliedScale:
    """The value of a loss scale that the gradients of `members` are multiplied by."""

    scaler: Scaler
    scale: Any
    generation: int  # of the scaler, when `scale` was read
    members: list[OptimizerGradients] = dataclasses.field(default_factory=list)

    def add_member(self, member: OptimizerGradients, complete: list[Any]) -> None:
        """Add a member; multiply its `complete` gradients by this scale, in place."""
        self.scaler.scale_grads_(complete, self.scale)
        member.applied_scale = self
        if member not in self.members:
            self.members.append(member)


class OptimizerGradients:
    """The gradients of `optimizer`, through blocks, steps and `zero_grad`.

    The ranks of `process_group` share their overflow flag in each block.  In this package a
    `member` is one `OptimizerGradients`, and `members` are those of several optimizers.
    """

    def __init__(self, optimizer: Any, process_group: Any = None) -> None:
        self.optimizer = optimizer
        self.block: OptimizerBlock | None = None
        self.applied_scale: AppliedScale | None = None
        self.check: OverflowCheck | None = None  # all checks since gradients were zeroed
        self.pending_updates: list[Any] = []  # `delayed.PendingScaleUpdate`s
        self.scaled_by_other_block = False  # a block without this optimizer has added gradients
        self.had_block = False  # a block has begun since the last step
        self.block_count = 0
        self.has_logged_no_backward = False
        self._has_logged_graph = False
        self._process_group = process_group

    @property
    def state(self) -> GradState:
        """The present state; see the note of states."""
        if self.block is not None or self.applied_scale is not None:
            return GradState.SCALED
        if self.check is None:
            return GradState.NOT_SCALED
        may_skip = not self.check.is_consumed and self.check.found_inf is not False
        return GradState.FOUND_INF if may_skip else GradState.UNSCALED

    def parameters(self) -> Sequence[Tensor]:
        """The tensors that the optimizer updates, perhaps a group's own list: do not change it."""
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

    def before_block(self) -> None:
        """Log an error for gradients that another block left scaled; recheck old gradients."""
        if self.scaled_by_other_block:
            self.report_scaled_by_other_block()
        self.had_block = True
        if self.check is not None and self.check.is_consumed:
            self.recheck()

    def params_with_gradients(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def begin_block(
        self,
        params_with_earlier: list[Tensor],
        shared_scale: AppliedScale,
        owner_of: dict[int, OptimizerGradients],
    ) -> OptimizerBlock:
        """Open a block.

        `params_with_earlier`: the parameters that already have gradients.  Those gradients are
        saved in the block, or are scaled and stay in `.grad`.
        """
        params = params_with_earlier
        if not params:
            self.applied_scale = None
            self._forget()
        stays = bool(params) and (self.applied_scale is not None or world_size() > 1)
        if owner_of:
            params = self._own_params(params, owner_of)
        saved = [] if stays else [(param, param.grad) for param in params]
        # From here on `abandon` puts `saved` back.
        self.block = block = OptimizerBlock(owner_of, saved)
        self.block_count += 1
        if stays and self.applied_scale is None:
            shared_scale.add_member(self, list(map(_grad_of, params)))
        block.earlier_snapshot = self.snapshot() if stays else None
        for param, _ in saved:
            param.grad = None
        return block

    def has_new_gradients(self) -> bool:
        """Whether the open block has made gradients, or has changed earlier ones."""
        before = self.block and self.block.earlier_snapshot
        return self.has_changed_since(before) if before else self.has_gradients()

    def after_backward(
        self, block: OptimizerBlock, scaler: Scaler, scale: Any, *, is_delayed: bool
    ) -> OverflowCheck | None:
        """Unscale the new gradients and add them to the earlier ones; returns their check.

        `is_delayed`: the caller keeps the check (`delay_overflow_check`).
        """
        self.applied_scale = None
        check = self.unscale(scaler, scale, block.owner_of)
        if check is not None and not is_delayed:
            self.keep_check(check)
        self.block = None
        if block.saved_grads:
            add_back(block.saved_grads)
        return check

    def abandon(self) -> None:
        """End a failed block: drop its gradients, and put back the earlier ones."""
        if (block := self.block) is None:
            return
        if self.applied_scale is not None:
            logger.warning(
                "%s: an ampatch.scale_loss block raised after its backward pass had added to "
                "earlier gradients in p.grad (delay_unscale=True, or several ranks). These "
                "additions stay, as without ampatch. optimizer.zero_grad() drops the gradients "
                "of all micro-batches.",
                type(self.optimizer).__name__,
            )
        else:
            for param in self._own_params(self.parameters(), block.owner_of):
                param.grad = None
            for param, grad in block.saved_grads:
                param.grad = grad
        self.block = None

    def drop_all(self) -> None:
        """Drop all gradients, saved ones too: some may be unscaled and some not."""
        self.block = None
        for param in self.parameters():
            param.grad = None
        self.on_zero_grad()

    # Unscaling

    def unscale(
        self, scaler: Scaler, scale: Any, owner_of: dict[int, OptimizerGradients]
    ) -> OverflowCheck | None:
        """Unscale the gradients and check them for overflow.  Returns None if none was checked.

        Gradients that another optimizer of the block has already unscaled are only checked, by
        unscaling them with a scale of 1.
        """
        params = self.parameters()
        own_params = self._own_params(params, owner_of) if owner_of else params
        check = self._unscale(scaler, own_params, scale)
        if len(own_params) < len(params):
            others = [param for param in params if owner_of.get(id(param), self) is not self]
            second = self._unscale(scaler, others, scale / scale)
            check = second.merged_with(check) if check and second else check or second
        return check

    def _unscale(
        self, scaler: Scaler, params: Sequence[Tensor], scale: Any
    ) -> OverflowCheck | None:
        grads = [param.grad for param in params if param.grad is not None]
        if not (grads or self._process_group):
            return None
        if True in map(_has_graph, grads) and not self._has_logged_graph:
            self._has_logged_graph = True
            logger.warning(_GRAPH_MESSAGE, type(self.optimizer).__name__)
        found_inf = scaler.unscale_(grads, scale)
        if found_inf is None:
            return None
        groups, are_all = flag_groups(self._process_group, grads)
        if groups:
            found_inf = share_flag(found_inf, groups, grads)
        return OverflowCheck(found_inf, scaler, are_all, found_inf_since_step=found_inf)

    def _own_params(
        self, params: Sequence[Tensor], owner_of: dict[int, OptimizerGradients]
    ) -> list[Tensor]:
        """The `params` whose gradients this optimizer scales and unscales."""
        return [param for param in params if owner_of.get(id(param), self) is self]

    def keep_check(self, check: OverflowCheck) -> None:
        """Keep a check until the step."""
        self.check = check if self.check is None else check.merged_with(self.check)

    def keep_flag(self, found_inf: OverflowFlag, scaler: Scaler) -> None:
        """Keep an overflow flag as a check: with several processes the step checks again."""
        self.keep_check(
            OverflowCheck(found_inf, scaler, is_all_reduced=False, found_inf_since_step=found_inf)
        )

    def recheck(self) -> OverflowFlag | None:
        """Check gradients again if their check may no longer hold.

        A check no longer holds after a step without `zero_grad`, because an inf may be left in the
        gradients.  With several processes, the script may also have averaged another rank's
        inf into them.  Returns found_inf, or None if nothing was checked.
        """
        earlier = self.check
        if earlier is None or self.block is not None or self.applied_scale is not None:
            return None
        if not earlier.is_consumed and (earlier.is_all_reduced or not trains_with_others()):
            return None
        if not self.has_gradients():
            if earlier.is_consumed:
                self.check = None
            return None
        scale = earlier.scaler.peek()
        unit_scale = scale / scale  # 1, on the device of the scale
        check = self.unscale(earlier.scaler, unit_scale, {})
        if check is None:
            return None
        if earlier.is_consumed:
            check.found_inf_since_step = None
            check.includes_used = True
        self.keep_check(check)
        return check.found_inf

    def overflow_is_left_over(self) -> bool:
        """Whether the overflow is only in gradients of an earlier step, which were not zeroed.

        With several ranks False after a new backward pass, which adds gradients in place.
        Synchronizes with the device.
        """
        check = self.check
        if check is None or not check.includes_used:
            return False
        return check.found_inf_since_step is None or not is_set(check.found_inf_since_step)

    # Steps and zeroes

    def take_found_inf(self) -> OverflowFlag | None:
        """Consume the check, for a step.  Returns its flag, or None if nothing was checked."""
        check = self.check
        if check is None or check.is_consumed:
            return None
        check.is_consumed = True
        return check.found_inf if self.has_gradients() else None

    def on_zero_grad(self) -> None:
        """Forget scale and overflow of the gradients, which were zeroed."""
        self.applied_scale = None
        self.scaled_by_other_block = False
        self._forget()
        if (block := self.block) is None:
            return
        block.saved_grads = []
        if block.owner_of:
            # Other optimizers of the block may have saved gradients of the same parameters.
            zeroed = set(map(id, self.parameters()))
            for member in dict.fromkeys(block.owner_of.values()):
                member.on_zeroed_elsewhere(zeroed)

    def on_zeroed_elsewhere(self, zeroed: set[int]) -> None:
        """Drop saved gradients of these parameters (ids); if none is left, forget the overflow."""
        if (block := self.block) is not None:
            block.saved_grads = [
                (param, grad) for param, grad in block.saved_grads if id(param) not in zeroed
            ]
            if block.saved_grads:
                return
        if all(param.grad is None or id(param) in zeroed for param in self.parameters()):
            self.scaled_by_other_block = False
            self._forget()

    def _forget(self) -> None:
        self.check = None
        for update in self.pending_updates:
            update.forget_checks(self)

    # Blocks of other optimizers: in a GAN the generator's backward also adds scaled gradients to
    # the discriminator, which the script then zeroes.

    def before_other_block(self) -> GradSnapshot | None:
        """The gradients as they are before a block of another optimizer, for `after_other_block`.

        Returns None if this optimizer is in a block of its own, in another thread.
        """
        return self.snapshot() if self.block is None else None

    def after_other_block(self, before: GradSnapshot | None) -> None:
        """Record whether a block of another optimizer, which has ended, changed gradients.

        Changes by a block of this optimizer do not count.
        """
        if before is None or self.block is not None or self.block_count != before.block_count:
            return
        self.scaled_by_other_block |= self.has_changed_since(before)

    def snapshot(self) -> GradSnapshot:
        """The gradients as they are now, for `has_changed_since`."""
        grads = list(map(_grad_of, self.parameters()))
        versions = [-1 if grad is None else grad._version for grad in grads]
        return GradSnapshot(self.block_count, grads, versions)

    def has_changed_since(self, before: GradSnapshot) -> bool:
        """Whether a gradient was replaced, or written into."""
        _, grads, versions = self.snapshot()
        return versions != before.versions or not all(map(operator.is_, before.grads, grads))

    def report_scaled_by_other_block(self) -> None:
        """Log an error if a block of another optimizer has left gradients here scaled."""
        if self.scaled_by_other_block and self.has_gradients():
            logger.error(
                "%s: its gradients are still scaled, because they come from an ampatch.scale_loss "
                "block that this optimizer was not passed to. Pass every optimizer that the loss "
                "reaches, scale_loss(loss, [first, second]), or zero_grad() this one before its "
                "own block.",
                type(self.optimizer).__name__,
            )
        self.scaled_by_other_block = False


def find_owners(members: Sequence[OptimizerGradients]) -> dict[int, OptimizerGradients]:
    """Map the id of each parameter to the first of `members` that has it; {} if none is shared.

    After an overflow in its gradient, all optimizers that have the parameter skip.
    """
    if len(members) < 2:
        return {}
    pairs = [(id(param), member) for member in members for param in member.parameters()]
    owner_of = dict(reversed(pairs))
    return owner_of if len(owner_of) < len(pairs) else {}
