"""The body of `scale_loss`: what happens before and after the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .gradient_flow import GradientFlow
from .gradient_state import Event, Pending, Unscaled, update_scaler
from .loss_scaler import Scaler
from .optimizer import ManagedOptimizer
from .scale_value import either
from .shared_parameters import NOTHING_SHARED, sharing_among


class ScaledBackward:
    """Context manager: yields the scaled loss, then unscales the gradients it led to.

    If the block raises (Ctrl-C among it), the gradients that were there before it
    are put back, those of a half-done backward pass are dropped, and the scale is
    left alone.  If the unscaling itself is interrupted, the optimizers have no
    gradients afterwards: some would be scaled and some not.  `others` are
    optimizers that the block was not given; if the backward pass reaches them, they
    log an error when they step.  With `together` an overflow in the gradients of one
    optimizer has all of them skip.
    """

    __slots__ = (
        *("_loss", "_flows", "_sharing", "_others", "_scaler", "_scale", "_pending"),
        *("_delay_unscale", "_delay_check", "_together"),
    )

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[ManagedOptimizer],
        scaler: Scaler,
        delay_unscale: bool,
        delay_overflow_check: bool,
        others: Sequence[ManagedOptimizer],
        together: bool = False,
    ) -> None:
        self._loss = loss
        self._flows: list[GradientFlow] = []
        for optimizer in optimizers:
            self._flows.append(optimizer.gradients)
        self._sharing = NOTHING_SHARED if len(self._flows) == 1 else sharing_among(self._flows)
        self._others: Sequence[tuple[GradientFlow, Any]] = ()
        if others and not scaler.is_one:
            flows = [other.gradients for other in others]
            self._others = [(flow, flow.others.before()) for flow in flows]
        self._scaler = scaler
        self._delay_unscale = delay_unscale
        self._delay_check = delay_overflow_check
        self._together = together and len(self._flows) > 1
        self._scale: Any = None

    def __enter__(self) -> Tensor:
        for flow in self._flows:
            if flow.state.in_block:
                flow.state.refuse(Event.ENTER)
        try:
            held: list[list[Tensor]] = []
            self._pending: Pending | None = None
            for flow in self._flows:
                held.append(flow.gather(self._scaler))
            for flow in self._flows:
                self._pending = self._pending or flow.state.pending
            scaled, self._scale = self._scaler.scale(self._loss)
            for flow, params in zip(self._flows, held, strict=True):
                flow.make_room(params, self._joined, self._sharing)
            return scaled
        except BaseException:
            for flow in self._flows:
                flow.abandon_backward(self._sharing)
            raise

    def _joined(self) -> Pending:
        """What gradients that stay scaled join: what is pending already, or something new."""
        if self._pending is None:
            self._pending = Pending(self._scaler, self._scale)
        return self._pending

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for flow, before in self._others:
            flow.others.after(before)
        if kind is not None:
            for flow in self._flows:
                flow.abandon_backward(self._sharing)
            return
        try:
            if self._delay_unscale:
                for flow in self._flows:
                    flow.leave_scaled(self._joined(), self._sharing)
            else:
                self._unscale()
        except BaseException:
            for flow in self._flows:
                flow.drop_gradients()
            raise

    def _unscale(self) -> None:
        flags = []
        for flow in self._flows:
            found = flow.after_backward(self._scaler, self._scale, self._sharing)
            if found is not None:
                flags.append(found)
        if self._together and flags:
            found, by = functools.reduce(either, flags), Unscaled(self._scaler, self._scale)
            for flow in self._flows:
                flow.state.note_overflow(found, by)
        update_scaler(
            self._scaler, flags, self._flows, at_step=self._delay_check, together=self._together
        )
