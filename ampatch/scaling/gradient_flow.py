"""The gradients of one optimizer, from the backward pass to the step.

They are unscaled and complete in `.grad` of the tensors in `param_groups` (the
masters, or the FP32 parameters themselves) whenever `scale_loss` is not
running, except after `delay_unscale=True`: then they are *pending*, scaled by
a scaler at a known generation, until the next `scale_loss` or the step
finishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import AmpatchError
from ..log import logger
from .left_scaled import LeftScaled, Seen
from .loss_scaler import Scaler
from .master_weights import MasterWeights
from .overflow import Overflow, Unscaled
from .pending import Pending
from .ranks import share_flag, world_size
from .sharing import Sharing


class GradientFlow:
    """Scaled in, unscaled and added up, looked at for overflow.

    The ranks of `process_group` share their overflow flag.
    """

    def __init__(
        self,
        optimizer: Any,
        process_group: Any = None,
        whole: Callable[[list[Tensor]], list[Tensor]] = lambda grads: grads,
    ) -> None:
        self.optimizer = optimizer
        self.masters = MasterWeights()
        self.pending: Pending | None = None
        self._process_group = process_group
        self._whole = whole
        self._overflow = Overflow()
        self.left_scaled = LeftScaled(optimizer, self._leaves)
        self._fed = False  # a block was entered since the last step
        self._deferred: list[Scaler] = []  # their update waits for the step
        self._in_block = False
        self._aside: list[tuple[Tensor, Tensor]] = []

    def parameters(self) -> list[Tensor]:
        """The tensors the optimizer updates: masters, or the parameters themselves."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

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

    def refuse_step_in_block(self) -> None:
        """Raise `AmpatchError` inside a `scale_loss` block: gradients are not unscaled yet."""
        if self._in_block:
            raise AmpatchError(
                f"{type(self.optimizer).__name__}.step() inside the ampatch.scale_loss block of this "
                "optimizer: its gradients are still scaled. Call step() after the block."
            )

    def gather(self) -> list[Tensor]:
        """Before a backward pass: complete the gradients; returns whose there are."""
        self.left_scaled.report()
        self._fed = True
        self.masters.settle()
        self.take_unscaled()
        self.check_spent()
        return self._held()

    def make_room(self, held: list[Tensor], pending: Pending, sharing: Sharing) -> None:
        """Set the gradients that `gather` found aside, or scale them as those that come."""
        owned = sharing.owned(self, held)
        alone = not held or world_size() == 1
        own = [param for param in owned if alone and self.masters.half_of(param) is None]
        self._aside = [(param, param.grad) for param in own]
        self._in_block = True  # from here on there is something to put back
        if not held:
            self.pending = None
            self._overflow.forget()
        elif not alone:
            self._put_back_scaled(owned, pending)
        for param in own:  # what backward adds must be told from what was there
            param.grad = None

    def _put_back_scaled(self, owned: list[Tensor], pending: Pending) -> None:
        """Leave earlier gradients where backward adds to them, so one all-reduce serves both."""
        if self.pending is None:
            pending.scale_up([param.grad for param in owned])
            self._wait_in(pending)
        for param in owned:
            half = self.masters.half_of(param)
            if half is not None:
                half.grad, param.grad = param.grad.to(half.dtype), None

    def after_backward(self, scaler: Scaler, scale: Any, sharing: Sharing) -> Tensor | None:
        """Unscale the new gradients and add them to the earlier ones; returns found_inf."""
        self._in_block = False
        masters, fresh = self.masters.take_grads()
        if self.pending is not None:
            self.pending = None
            _add(masters, fresh)
            self._add_aside()
            return self._unscale_all(scaler, scale, sharing)
        own = self._held()
        if len(self.masters):
            own = [param for param in own if self.masters.half_of(param) is None]
        grads = [*[param.grad for param in own], *fresh]
        found = sharing.unscale(self, scaler, [*own, *masters], grads, scale)
        _add(masters, fresh)
        self._add_aside()
        return found

    def _held(self) -> list[Tensor]:
        return [param for param in self.parameters() if param.grad is not None]

    def _unscale_all(self, scaler: Scaler, scale: Any, sharing: Sharing) -> Tensor | None:
        params = self._held()
        return sharing.unscale(self, scaler, params, [param.grad for param in params], scale)

    def defer_update(self, scaler: Scaler) -> None:
        """The next step is when `scaler` is to react to the flags it has."""
        if scaler not in self._deferred:
            self._deferred.append(scaler)

    def update_deferred(self) -> None:
        """Let the scalers react to the flags that were left for the step."""
        for scaler in self._deferred:
            scaler.update([])
        self._deferred.clear()

    def leave_scaled(self, pending: Pending, sharing: Sharing) -> None:
        """`delay_unscale`: bring everything to the scaler's scale and leave it there."""
        self._in_block = False
        taken = self.masters.take_grads()
        if self.pending is None:
            masters = sharing.owned(self, [pair.master for pair in self.masters])
            earlier = [master.grad for master in masters if master.grad is not None]
            aside = [grad for _, grad in self._aside]
            pending.scale_up([*earlier, *aside])
        _add(*taken)
        self._add_aside()
        self._wait_in(pending)

    def _wait_in(self, pending: Pending) -> None:
        self.pending = pending
        pending.join(self)

    def abandon_backward(self, sharing: Sharing) -> None:
        """The backward pass failed: drop what it left, put back what was there.

        With several ranks the earlier gradients are where backward added to
        them; they stay, and what the failed pass added stays with them.
        """
        if not self._in_block:
            return
        self._in_block = False
        taken = self.masters.take_grads()
        if world_size() > 1 and self.pending is not None:
            _add(*taken)
            return
        for param in sharing.owned(self, self.parameters()):
            if self.masters.half_of(param) is None:
                param.grad = None
        for param, grad in self._aside:
            param.grad = grad
        self._aside = []

    def drop_gradients(self) -> None:
        """Have no gradients, those set aside among them, rather than some that are half done."""
        self._in_block = False
        self._aside = []
        self.forget_gradients()
        for param in self.parameters():
            param.grad = None

    def finish_pending(self) -> None:
        """Unscale what `delay_unscale` left scaled."""
        if self.pending is not None:
            self.pending.finish()

    def unscale_pending(self, scaler: Scaler, sharing: Sharing) -> Tensor | None:
        """This optimizer's part of `Pending.finish`; returns found_inf."""
        scale, self.pending = self.pending.scale, None
        return self._unscale_all(scaler, scale, sharing)

    def check(
        self, scaler: Scaler, grads: list[Tensor], scale: Any, concerned: list[GradientFlow]
    ) -> Tensor | None:
        """Unscale, and look for overflow on behalf of all `concerned`; returns found_inf."""
        if not scaler.is_one:  # else nothing is written
            grads = self._whole(self.masters.whole(grads))
        found = scaler.unscale_(grads, scale)
        if found is None or not (grads or self._process_group):
            return None  # without gradients there is nothing to learn for the scale
        if self._process_group is not None:
            share_flag(found, self._process_group)
        for flow in concerned:
            flow._overflow.note(found, Unscaled(scaler, scale))
        return found

    def note_outsider(self, before: Seen) -> None:
        """A block that this optimizer was not given to has ended; `before` is what was `seen`."""
        if not self._in_block:
            self.left_scaled.note(before)

    def _leaves(self) -> Iterator[Tensor]:
        """Where autograd leaves gradients: the half parameters of masters, or the parameters."""
        for param in self.parameters():
            half = self.masters.half_of(param)
            yield param if half is None else half

    def forget_gradients(self) -> None:
        """All gradients were zeroed: nothing is pending, no overflow is remembered."""
        self.pending = None
        self._overflow.forget()
        self.left_scaled.forget()
        self._aside = []
        self.masters.drop_grads()

    def forget_overflow(self, zeroed: set[int]) -> None:
        """Forget an overflow if no gradients are left; `zeroed` are ids of model parameters."""
        self._aside = [(param, grad) for param, grad in self._aside if id(param) not in zeroed]
        if (self._overflow or self.left_scaled) and all(
            param.grad is None or id(param) in zeroed or id(self.masters.half_of(param)) in zeroed
            for param in self.parameters()
        ):
            self._overflow.forget()
            self.left_scaled.forget()

    def take_unscaled(self) -> None:
        """Gradients that a plain `loss.backward()` left in half weights count as unscaled."""
        if self.masters.has_grads() and not self._in_block:
            self.finish_pending()
            _add(*self.masters.take_grads())

    def ready(self, wanted: set[int]) -> None:
        """Somebody is about to use gradients of these tensors (ids): leave none scaled or half."""
        leaves = zip(self.parameters(), self._leaves(), strict=True)
        if any(id(param) in wanted or id(leaf) in wanted for param, leaf in leaves):
            if self._in_block:
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
        return any(param.grad is not None for param in self.parameters())

    def _add_aside(self) -> None:
        for param, grad in self._aside:
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        self._aside = []

    def take_overflow(self) -> bool:
        """Whether the gradients gathered since the last look overflowed.  Waits for the device."""
        found = self.take_found_inf()
        return found is not None and bool(found.item())

    def take_found_inf(self) -> Tensor | None:
        """The overflow flag of the gradients there are; None: nothing was checked."""
        self.check_spent()
        found = self._overflow.take()
        return found if self.has_gradients() else None  # setting them to None takes it away too

    def check_spent(self) -> None:
        """Look again at gradients that a step has used and nobody zeroed: inf may be left there."""
        spent = self._overflow.take_spent()
        if spent is not None and self.pending is None and self.has_gradients():
            self._unscale_all(spent.scaler, torch.ones_like(spent.scale), Sharing())


def _add(masters: list[Tensor], grads: list[Tensor]) -> None:
    """Add gradients to those that masters have."""
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad if master.grad is None else master.grad.add_(grad)
