"""The body of `scale_loss`: what happens before and after the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .loss_scaler import Scaler
from .optimizer import ManagedOptimizer
from .pending import Pending, tell
from .sharing import Sharing


class ScaledBackward:
    """Context manager: yields the scaled loss, then unscales the gradients it led to.

    If the block raises (Ctrl-C among it), the gradients that were there before it
    are put back, those of a half-done backward pass are dropped, and the scale is
    left alone.  If the unscaling itself is interrupted, the optimizers have no
    gradients afterwards: some would be scaled and some not.  `outsiders` are
    optimizers that it was not given to; if the backward pass reaches them, they
    will say so when they step.
    """

    __slots__ = (
        "_loss",
        "_optimizers",
        "_sharing",
        "_outsiders",
        "_scaler",
        "_scale",
        "_pending",
        "_delay_unscale",
        "_delay_check",
        "_done",
    )

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[ManagedOptimizer],
        scaler: Scaler,
        *,
        delay_unscale: bool,
        delay_overflow_check: bool,
        outsiders: Sequence[ManagedOptimizer] = (),
        done: Callable[[], None],
    ) -> None:
        self._loss = loss
        self._optimizers = optimizers
        self._sharing = Sharing(optimizers)
        self._outsiders = (
            [] if scaler.is_one else [(other, other.left_scaled.seen()) for other in outsiders]
        )
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._delay_check = delay_overflow_check
        self._done = done

    def __enter__(self) -> Tensor:
        for optimizer in self._optimizers:
            optimizer.refuse_nesting()
        try:
            return self._enter()
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.abandon_backward(self._sharing)
            raise

    def _enter(self) -> Tensor:
        for optimizer in self._optimizers:
            optimizer.finish_other(self._scaler)
        held = [optimizer.gather() for optimizer in self._optimizers]
        scaled, self._scale = self._scaler.scale(self._loss)
        known = [optimizer.pending for optimizer in self._optimizers if optimizer.pending]
        self._pending = known[0] if known else Pending(self._scaler, self._scale)
        for optimizer, params in zip(self._optimizers, held, strict=True):
            optimizer.make_room(params, self._pending, self._sharing)
        return scaled

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
                optimizer.leave_scaled(self._pending, self._sharing)
            return
        found = [
            optimizer.after_backward(self._scaler, self._scale, self._sharing)
            for optimizer in self._optimizers
        ]
        tell(self._scaler, found, self._optimizers, at_step=self._delay_check)
