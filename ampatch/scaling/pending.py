"""What `delay_unscale` leaves behind: gradients that are still scaled, and by what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .loss_scaler import Scaler
from .sharing import Sharing

if TYPE_CHECKING:
    from .optimizer import ManagedOptimizer


class Pending:
    """Scaled gradients of one or several optimizers, all by the same value of one scaler.

    They are unscaled together, so that the scaler counts one step however many
    optimizers a loss feeds.
    """

    def __init__(self, scaler: Scaler, scale: Any) -> None:
        self._scaler = scaler
        self._generation = scaler.generation
        self._optimizers: list[ManagedOptimizer] = []
        self.scale = scale

    def join(self, optimizer: ManagedOptimizer) -> None:
        """Count an optimizer's gradients among these."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def is_scaled_by(self, scaler: Scaler) -> bool:
        """Whether new gradients of `scaler` may be added: it has not moved since."""
        return self._scaler is scaler and self._generation == scaler.generation

    def finish(self) -> None:
        """Unscale the gradients, and let the scaler know."""
        waiting = [optimizer for optimizer in self._optimizers if optimizer.pending is self]
        sharing = Sharing(waiting)
        found = [optimizer.unscale_pending(self._scaler, sharing) for optimizer in waiting]
        self._scaler.update([flag for flag in found if flag is not None])
