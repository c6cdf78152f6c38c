"""The body of `scale_loss`: what happens before and after the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .loss_scaler import Scaler
from .optimizer import ManagedOptimizer
from .pending import Pending, tell
from .scale_value import either
from .shared_parameters import NOTHING_SHARED, sharing_among


class ScaledBackward:
    """Context manager: yields the scaled loss, then unscales the gradients it led to.

    If the block raises (Ctrl-C among it), the gradients that were there before it
    are put back, those of a half-done backward pass are dropped, and the scale is
    left alone.  If the unscaling itself is interrupted, the optimizers have no
    gradients afterwards: some would be scaled and some not.  `outsiders` are
    optimizers that it was not given to; if the backward pass reaches them, they
    will say so when they step.  With `together` an overflow in the gradients of one
    optimizer has all of them skip.
    """

    __slots__ = (
        "_delay_check",
        "_delay_unscale",
        "_done",
        "_loss",
        "_optimizers",
        "_outsiders",
        "_pending",
        "_scale",
        "_scaler",
        "_sharing",
        "_together",
    )

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[ManagedOptimizer],
        scaler: Scaler,
        delay_unscale: bool,
        delay_overflow_check: bool,
        outsiders: Sequence[ManagedOptimizer],
        done: Callable[[], None],
        together: bool = False,
    ) -> None:
        self._loss = loss
        self._optimizers = optimizers
        self._sharing = NOTHING_SHARED if len(optimizers) == 1 else sharing_among(optimizers)
        self._outsiders: Sequence[tuple[ManagedOptimizer, Any]] = ()
        if outsiders and not scaler.is_one:
            self._outsiders = [(other, other.seen_outside()) for other in outsiders]
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._delay_check = delay_overflow_check
        self._done = done
        self._together = together and len(optimizers) > 1

    def __enter__(self) -> Tensor:
        for optimizer in self._optimizers:
            if optimizer.in_block:
                optimizer.refuse_nesting()
        try:
            held, self._pending = [], None
            for optimizer in self._optimizers:
                held.append(optimizer.gather(self._scaler))
            for optimizer in self._optimizers:
                self._pending = self._pending or optimizer.pending
            scaled, self._scale = self._scaler.scale(self._loss)
            for optimizer, params in zip(self._optimizers, held, strict=True):
                optimizer.make_room(params, self._waiting, self._sharing)
            return scaled
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.abandon_backward(self._sharing)
            raise

    def _waiting(self) -> Pending:
        """What gradients that stay scaled join: what is pending already, or something new."""
        if self._pending is None:
            self._pending = Pending(self._scaler, self._scale)
        return self._pending

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._done()
        for outsider, before in self._outsiders:
            outsider.note_outsider(before)
        if kind is not None:
            for optimizer in self._optimizers:
                optimizer.abandon_backward(self._sharing)
            return
        try:
            self._finish()
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.drop_gradients()
            raise

    def _finish(self) -> None:
        if self._delay_unscale:
            for optimizer in self._optimizers:
                optimizer.leave_scaled(self._waiting(), self._sharing)
            return
        flags = []
        for optimizer in self._optimizers:
            found = optimizer.after_backward(self._scaler, self._scale, self._sharing)
            if found is not None:
                flags.append(found)
        if self._together and flags:
            found = functools.reduce(either, flags)
            for optimizer in self._optimizers:
                optimizer.note_overflow(found, self._scaler, self._scale)
        tell(self._scaler, flags, self._optimizers, at_step=self._delay_check)
