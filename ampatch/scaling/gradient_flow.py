"""The gradients of one optimizer, from the backward pass to the step.

They are unscaled and complete in `.grad` of the tensors in `param_groups` (the
masters, or the FP32 parameters themselves) whenever `scale_loss` is not
running, except after `delay_unscale=True`: then they are *pending*, scaled by
a scaler at a known generation, until the next `scale_loss` or the step
finishes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import AmpatchError
from ..log import logger
from .loss_scaler import Scaler
from .master_weights import MasterWeights, world_size
from .pending import Pending


class GradientFlow:
    """Scaled in, unscaled and added up, looked at for overflow.

    The ranks of `process_group` share their overflow flag.
    """

    def __init__(self, optimizer: Any, process_group: Any = None) -> None:
        self.optimizer = optimizer
        self.masters = MasterWeights()
        self.pending: Pending | None = None
        self._process_group = process_group
        self._found_inf: Tensor | None = None
        self._deferred: list[Scaler] = []  # their update waits for the step
        self._in_block = False
        self._left_scaled = False  # by a block that this optimizer was not given to
        self._aside: list[tuple[Tensor, Tensor]] = []

    def parameters(self) -> Iterator[Tensor]:
        """The tensors the optimizer updates: masters, or the parameters themselves."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def settle(self) -> None:
        """Bring all up to date: half weights written from outside, gradients left anywhere."""
        self.finish_pending()
        self.masters.settle()
        self.take_unscaled()

    def refuse_nesting(self) -> None:
        """Raise `AmpatchError` inside another `scale_loss` block for the same optimizer."""
        if self._in_block:
            raise AmpatchError(
                f"ampatch.scale_loss(..., <{type(self.optimizer).__name__}>): this optimizer is "
                "already in an enclosing scale_loss block. Leave that block first; the gradients "
                "of several blocks add up until the step."
            )

    def finish_other(self, scaler: Scaler) -> None:
        """Unscale what is pending, unless `scaler`, as it is now, may add to it."""
        if self.pending is not None and not self.pending.is_scaled_by(scaler):
            self.pending.finish()

    def before_backward(self, scaler: Scaler, scale: Any) -> None:
        """Make room for gradients scaled by `scale`: set aside, or scale, what is there."""
        self.report_left_scaled()
        self._in_block = True
        self.masters.settle()
        self.take_unscaled()
        held = [param for param in self.parameters() if param.grad is not None]
        if not held:
            self.pending = self._found_inf = None
        elif world_size() > 1:
            self._put_back_scaled(held, scaler, scale)
        else:  # what backward adds must be told from what was there
            self._aside = [
                (param, param.grad) for param in held if self.masters.half_of(param) is None
            ]
            for param, _ in self._aside:
                param.grad = None

    def _put_back_scaled(self, held: list[Tensor], scaler: Scaler, scale: Any) -> None:
        """Leave earlier gradients where backward adds to them, so one all-reduce serves both."""
        if self.pending is None:
            scaler.scale_grads_(_values([param.grad for param in held]), scale)
            self.pending = Pending(scaler, scale)
            self.pending.join(self)
        for param in held:
            half = self.masters.half_of(param)
            if half is not None:
                half.grad, param.grad = param.grad.to(half.dtype), None

    def after_backward(
        self, scaler: Scaler, scale: Any, *, defer_update: bool = False
    ) -> Tensor | None:
        """Unscale the new gradients and add them to the earlier ones; returns found_inf."""
        self._in_block = False
        fresh = self.masters.take_grads()
        if self.pending is not None:
            self.pending = None
            self._add_to_masters(fresh)
            self._add_aside()
            found = self._unscale(scaler, self._all_grads(), scale)
        else:
            own = [
                param.grad
                for param in self.parameters()
                if param.grad is not None and self.masters.half_of(param) is None
            ]
            found = self._unscale(scaler, [*own, *fresh.values()], scale)
            self._add_to_masters(fresh)
            self._add_aside()
        if defer_update and scaler not in self._deferred:
            self._deferred.append(scaler)
        return found

    def update_deferred(self) -> None:
        """Let the scalers react to the flags that `scale_loss` left for the step."""
        for scaler in self._deferred:
            scaler.update([])
        self._deferred.clear()

    def leave_scaled(self, pending: Pending, scaler: Scaler) -> None:
        """`delay_unscale`: bring everything to the scaler's scale and leave it there."""
        self._in_block = False
        fresh = self.masters.take_grads()
        if self.pending is None:
            earlier = [pair.master.grad for pair in self.masters if pair.master.grad is not None]
            aside = [grad for _, grad in self._aside]
            scaler.scale_grads_(_values([*earlier, *aside]), pending.scale)
        self._add_to_masters(fresh)
        self._add_aside()
        self.pending = pending
        pending.join(self)

    def abandon_backward(self) -> None:
        """The backward pass failed: drop what it left, put back what was there.

        With several ranks the earlier gradients are where backward added to
        them; they stay, and what the failed pass added stays with them.
        """
        self._in_block = False
        fresh = self.masters.take_grads()
        if world_size() > 1 and self.pending is not None:
            self._add_to_masters(fresh)
            return
        for param in self.parameters():
            if self.masters.half_of(param) is None:
                param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        self._aside = []

    def finish_pending(self) -> None:
        """Unscale what `delay_unscale` left scaled."""
        if self.pending is not None:
            self.pending.finish()

    def unscale_pending(self, scaler: Scaler) -> Tensor | None:
        """This optimizer's part of `Pending.finish`; returns found_inf."""
        scale, self.pending = self.pending.scale, None
        return self._unscale(scaler, self._all_grads(), scale)

    def _unscale(self, scaler: Scaler, grads: list[Tensor], scale: Any) -> Tensor | None:
        found = scaler.unscale_(_values(grads), scale)
        if found is None:
            return None
        if self._process_group is not None:
            torch.distributed.all_reduce(
                found, torch.distributed.ReduceOp.MAX, group=self._process_group
            )
        known = self._found_inf
        self._found_inf = found if known is None else torch.maximum(known, found.to(known.device))
        return found

    def seen(self) -> dict[int, tuple[int, int]]:
        """Which gradients backward has left, and their versions, to tell later what it changed."""
        return {
            id(leaf): (id(leaf.grad), leaf.grad._version)
            for leaf in self._leaves()
            if leaf.grad is not None
        }

    def note_outsider(self, before: dict[int, tuple[int, int]]) -> None:
        """A block that this optimizer was not given to has ended; `before` is what was `seen`."""
        if not self._in_block and self.seen() != before:
            self._left_scaled = True

    def report_left_scaled(self) -> None:
        """Say so if gradients are about to be used that some block left scaled."""
        if self._left_scaled and self.seen():
            logger.error(
                "%s: gradients are used that an ampatch.scale_loss block left scaled, because it "
                "was not given this optimizer. Pass every optimizer the loss reaches, "
                "scale_loss(loss, [first, second]), or zero_grad() this one before its own block.",
                type(self.optimizer).__name__,
            )
        self._left_scaled = False

    def _leaves(self) -> Iterator[Tensor]:
        """Where autograd leaves gradients: the half parameters of masters, or the parameters."""
        for param in self.parameters():
            half = self.masters.half_of(param)
            yield param if half is None else half

    def forget_gradients(self) -> None:
        """All gradients were zeroed: nothing is pending, no overflow is remembered."""
        self.pending = self._found_inf = None
        self._left_scaled = False
        self.masters.drop_grads()

    def forget_overflow(self, zeroed: set[int]) -> None:
        """Forget an overflow if no gradients are left; `zeroed` are ids of model parameters."""
        if (self._found_inf is not None or self._left_scaled) and all(
            param.grad is None or id(param) in zeroed or id(self.masters.half_of(param)) in zeroed
            for param in self.parameters()
        ):
            self._found_inf = None
            self._left_scaled = False

    def take_unscaled(self) -> None:
        """Gradients that a plain `loss.backward()` left in half weights count as unscaled."""
        if self.masters.has_grads():
            self.finish_pending()
            self._add_to_masters(self.masters.take_grads())

    def _all_grads(self) -> list[Tensor]:
        return [param.grad for param in self.parameters() if param.grad is not None]

    def _add_to_masters(self, fresh: dict[int, Tensor]) -> None:
        for pair in self.masters:
            grad = fresh.get(id(pair.master))
            if grad is None:
                continue
            pair.master.grad = grad if pair.master.grad is None else pair.master.grad.add_(grad)

    def _add_aside(self) -> None:
        for param, grad in self._aside:
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        self._aside = []

    def take_overflow(self) -> bool:
        """Whether the gradients gathered since the last look overflowed.  Waits for the device."""
        found = self.take_found_inf()
        return found is not None and bool(found.item())

    def take_found_inf(self) -> Tensor | None:
        """The overflow flag of the gradients gathered since it was last taken; None: unchecked."""
        found, self._found_inf = self._found_inf, None
        return found


def _values(grads: list[Tensor]) -> list[Tensor]:
    """The tensors that hold the numbers: of a sparse gradient its values, coalesced."""
    return [grad._values() if grad.is_sparse else grad for grad in grads]
