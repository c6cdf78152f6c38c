"""The body of `scale_loss`: what happens before and after the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .loss_scaler import Scaler
from .optimizer import ManagedOptimizer


class ScaledBackward:
    """Context manager: yields the scaled loss, then unscales the gradients it led to.

    If the block raises, the gradients that were there before it are put back
    and the scale is left alone.
    """

    __slots__ = ("_loss", "_optimizers", "_scaler", "_delay_unscale", "_delay_check", "_done")

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[ManagedOptimizer],
        scaler: Scaler,
        *,
        delay_unscale: bool,
        delay_overflow_check: bool,
        done: Callable[[], None],
    ) -> None:
        self._loss = loss
        self._optimizers = optimizers
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._delay_check = delay_overflow_check
        self._done = done

    def __enter__(self) -> Tensor:
        for optimizer in self._optimizers:
            optimizer.before_backward(self._scaler)
        return self._scaler.scale(self._loss)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._done()
        for optimizer in self._optimizers:
            if kind is not None:
                optimizer.abandon_backward()
            elif self._delay_unscale:
                optimizer.leave_scaled(self._scaler)
        if kind is None and not self._delay_unscale:
            found = [
                optimizer.after_backward(self._scaler, defer_update=self._delay_check)
                for optimizer in self._optimizers
            ]
            update = self._scaler.defer if self._delay_check else self._scaler.update
            update([flag for flag in found if flag is not None])
