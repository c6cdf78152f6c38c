"""The gradients of one optimizer, from one backward pass to the next and to the step.

They are unscaled and complete in `.grad` of the tensors in `param_groups` (the
masters, or the FP32 parameters themselves) whenever `scale_loss` is not
running, except after `delay_unscale=True`: then they are *pending*, scaled by
a scaler at a known generation, until the next `scale_loss` or the step
finishes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..log import logger
from ..torch_private.half_grads import is_in_backward, raw_grad, set_raw_grad
from .left_scaled import LeftScaled, Seen, entering
from .loss_scaler import Scaler
from .master_weights import MasterWeights
from .masters.arrivals import Arrivals
from .overflow import Overflow, Unscaled
from .pending import Pending
from .process_group import share_flag
from .scale_value import Flag, is_set
from .shared_parameters import NOTHING_SHARED, Sharing

_grad_of = operator.attrgetter("grad")


class GradientState:
    """Unscaled or pending, complete or left in half weights, looked at for overflow.

    The ranks of `process_group` share their overflow flag.  What a `scale_loss`
    block does with them is `GradientFlow`'s part.
    """

    def __init__(
        self,
        optimizer: Any,
        process_group: Any = None,
        name_of: Callable[[Tensor], str] = lambda half: "a weight",
    ) -> None:
        self.optimizer = optimizer
        self.masters = MasterWeights(self, name_of)
        self.pending: Pending | None = None
        self._process_group = process_group
        self._overflow = Overflow()
        self.left_scaled = LeftScaled(optimizer, self._leaves)
        self._arrivals = Arrivals(self._grad_arrived)
        self._passes_alone: bool | None = None  # without blocks; None: there was neither yet
        self._fed = False  # a block was entered since the last step
        self._deferred: list[Scaler] = []  # their update waits for the step
        self.in_block = False
        self._blocks = 0  # that have begun
        self._others_blocks = (
            0  # that are open, with a loss scale, and were not given this optimizer
        )
        self.reduces: bool | None = None  # DDP averages the pass of the last forward; None: no DDP
        self.is_unreduced = False  # masters' gradients that DDP has not averaged
        self._aside: list[tuple[Tensor, Tensor]] = []

    def parameters(self) -> Sequence[Tensor]:
        """The tensors the optimizer updates: masters, or the parameters themselves.

        Of a single group it is the list itself: for reading.
        """
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def settle(self) -> None:
        """Bring all up to date: half weights written from outside, gradients left anywhere."""
        self.finish_pending()
        self.masters.settle()
        self.take_unscaled()

    def _held(self) -> list[Tensor]:
        return [param for param in self.parameters() if param.grad is not None]

    def _unscale_all(self, scaler: Scaler, scale: Any, sharing: Sharing) -> Flag | None:
        if sharing is NOTHING_SHARED:
            grads = [grad for grad in map(_grad_of, self.parameters()) if grad is not None]
            return self.check(scaler, grads, scale, (self,))
        params = self._held()
        return sharing.unscale(self, scaler, params, list(map(_grad_of, params)), scale)

    def defer_update(self, scaler: Scaler) -> None:
        """The next step is when `scaler` is to react to the flags it has."""
        if scaler not in self._deferred:
            self._deferred.append(scaler)

    def update_deferred(self) -> None:
        """Let the scalers react to the flags that were left for the step."""
        for scaler in self._deferred:
            scaler.update([])
        self._deferred.clear()

    def finish_pending(self) -> None:
        """Unscale what `delay_unscale` left scaled."""
        if self.pending is not None:
            self.pending.finish()

    def unscale_pending(self, scaler: Scaler, sharing: Sharing) -> Flag | None:
        """This optimizer's part of `Pending.finish`; returns found_inf."""
        scale, self.pending = self.pending.scale, None
        return self._unscale_all(scaler, scale, sharing)

    def check(
        self, scaler: Scaler, grads: list[Tensor], scale: Any, concerned: Sequence[GradientState]
    ) -> Flag | None:
        """Unscale, and look for overflow on behalf of all `concerned`; returns found_inf."""
        found = scaler.unscale_(grads, scale)
        if found is None or not (grads or self._process_group):
            return None  # without gradients there is nothing to learn for the scale
        if self._process_group is not None:
            found = share_flag(found, self._process_group, grads)
        by = Unscaled(scaler, scale)
        for flow in concerned:
            flow._overflow.note(found, by)
        return found

    def note_overflow(self, found: Flag, scaler: Scaler, scale: Any) -> None:
        """Skip the next step if `found` is set, whoever's gradients that was seen in."""
        self._overflow.note(found, Unscaled(scaler, scale))

    def seen_outside(self) -> tuple[int, Seen] | None:
        """A block that this optimizer was not given to begins: what there is, for `note_outsider`.

        None: it is in a block of its own, in another thread.
        """
        with entering:
            if self.in_block:
                return None
            self._others_blocks += 1
            return self._blocks, self.left_scaled.seen()

    def note_outsider(self, before: tuple[int, Seen] | None) -> None:
        """A block that this optimizer was not given to has ended; `before` is what was seen.

        What has changed through a block of its own meanwhile is none of that block's.
        """
        with entering:
            if before is None:
                return
            self._others_blocks -= 1
            if not self.in_block and self._blocks == before[0]:
                self.left_scaled.note(before[1])

    def _enter_block(self) -> None:
        if self._passes_alone is None:
            self._passes_alone = False
            self._arrivals.forget()
        with entering:
            self.in_block = True
            self._blocks += 1

    def _leaves(self) -> Sequence[Tensor]:
        """Where autograd leaves gradients: the half parameters of masters, or the parameters."""
        params = self.parameters()
        if not self.masters.by_half:
            return params
        halves = map(self.masters.half_of, params)
        return [param if half is None else half for param, half in zip(params, halves, strict=True)]

    def watch_arrivals(self) -> None:
        """Take gradients over as they come, unless the script writes `scale_loss` blocks."""
        if self._passes_alone is not False:
            self._arrivals.watch(pair.half for pair in self.masters)

    def watch_anew(self) -> None:
        """Some masters have gone."""
        is_watching = bool(self._arrivals)
        self._arrivals.forget()
        if is_watching:
            self.watch_arrivals()

    def _grad_arrived(self, half: Tensor) -> None:
        """A pass outside blocks has left a gradient; what DDP is going to average stays there."""
        is_plain = not (self.in_block or self._others_blocks) and self.reduces is None
        if is_plain and id(half) in self.masters.by_half:
            self._passes_alone = True
            self.grad_of_half(half)

    def forget_gradients(self) -> None:
        """All gradients were zeroed: nothing is pending, no overflow is remembered."""
        self.pending = self._overflow.found = self._overflow.spent = None
        self.left_scaled.known = False
        self._aside = []
        if self.masters.by_half:
            self.masters.drop_grads()

    def forget_overflow(self, zeroed: set[int]) -> None:
        """Forget an overflow if no gradients are left; `zeroed` are ids of model parameters."""
        if self.in_block:  # what masters have is not to be seen there, but gone it is
            for half, master in self.masters:
                if id(half) in zeroed:
                    master.grad = None
        self._aside = [
            (param, grad)
            for param, grad in self._aside
            if id(param) not in zeroed and id(self.masters.half_of(param)) not in zeroed
        ]
        if (self._overflow or self.left_scaled.known) and all(
            param.grad is None or id(param) in zeroed or id(self.masters.half_of(param)) in zeroed
            for param in self.parameters()
        ):
            self._overflow.forget()
            self.left_scaled.known = False

    def take_unscaled(self) -> None:
        """Gradients that a plain `loss.backward()` left in half weights count as unscaled."""
        if self.masters.has_grads() and not self.in_block:
            self.finish_pending()
            self._take_passed()
            if self._passes_alone is False and self.reduces is None:  # there are both
                self._passes_alone = True
                self.watch_arrivals()

    def _take_passed(self) -> None:
        """Move what a finished pass left in half weights into their masters."""
        add_to(*self.masters.take_grads())
        self.is_unreduced = self.reduces is False

    def before_forward(self, reduces: bool | None, unscaled: bool) -> None:
        """An outermost forward of a model begins: what was written into masters reaches it.

        Gradients that earlier passes without `scale_loss` left are added up in FP32 before the
        next ones come.  `reduces` says whether DDP will average those over the ranks; then it gets
        what it has not averaged yet where it looks for it: in the half weights.  With
        a loss scale (not `unscaled`) it is for the block to do that.
        """
        if not self.masters.by_half:
            return
        if not (self.in_block or is_in_backward()):
            self.masters.before_forward()
            here = not (self.left_scaled.known or torch.is_inference_mode_enabled())
            if here and (unscaled or reduces is None):
                self.take_unscaled()
                if reduces and self.is_unreduced:
                    self.masters.put_grads_back()
        self.reduces = reduces

    # `.grad` of half weights that have masters

    def grad_of_half(self, half: Tensor) -> Tensor | None:
        """The master's gradient, what a plain backward pass has left added."""
        pair = self.masters.by_half[id(half)]
        grad = raw_grad(half)
        if grad is not None:
            with torch.inference_mode(False):
                self.finish_pending()
                set_raw_grad(half, None)
                add_to([pair.master], [grad.float()])
        return pair.master.grad

    def set_grad_of_half(self, half: Tensor, grad: Tensor | None) -> None:
        """Take a gradient, FP32 or half, in the place of the master's."""
        set_raw_grad(half, None)
        master = self.masters.by_half[id(half)].master
        master.grad = None if grad is None else grad.float()
        if self._aside:  # inside a block
            self._aside = [(param, held) for param, held in self._aside if param is not master]

    def ready(self, wanted: set[int]) -> None:
        """Somebody is about to use gradients of these tensors (ids): leave none scaled or half."""
        leaves = zip(self.parameters(), self._leaves(), strict=True)
        if any(id(param) in wanted or id(leaf) in wanted for param, leaf in leaves):
            if self.in_block:
                logger.error(
                    "%s: gradients are clipped inside its ampatch.scale_loss block, where they are "
                    "still scaled. Clip them after the block.",
                    type(self.optimizer).__name__,
                )
                return
            self.finish_pending()
        self.take_unscaled()

    def has_gradients(self) -> bool:
        """Whether there is anything to step on."""
        for param in self.parameters():
            if param.grad is not None:
                return True
        return False

    def take_overflow(self) -> bool:
        """Whether the gradients gathered since the last look overflowed.  Waits for the device."""
        found = self.take_found_inf()
        return found is not None and is_set(found)

    def take_found_inf(self) -> Flag | None:
        """The overflow flag of the gradients there are; None: nothing was checked."""
        if self._overflow.spent is not None:
            self.check_spent()
        found = self._overflow.take()
        return found if self.has_gradients() else None  # setting them to None takes it away too

    def check_spent(self) -> None:
        """Look again at gradients that a step has used and nobody zeroed: inf may be left there."""
        spent = self._overflow.take_spent()
        if spent is not None and self.pending is None and self.has_gradients():
            as_they_are = spent.scale / spent.scale  # 1, where the scale lives
            self._unscale_all(spent.scaler, as_they_are, NOTHING_SHARED)


def add_to(masters: list[Tensor], grads: list[Tensor]) -> None:
    """Add gradients to those that masters have."""
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad if master.grad is None else master.grad.add_(grad)
