"""What `delay_unscale` leaves behind: gradients that are still scaled, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .loss_scaler import Scaler
from .process_group import world_size
from .scale_value import Flag
from .shared_parameters import sharing_among

if TYPE_CHECKING:
    from .gradient_state import GradientState


class Pending:
    """Scaled gradients of one or several optimizers, all by the same value of one scaler.

    They are unscaled together, so that the scaler counts one step however many
    optimizers a loss feeds.
    """

    def __init__(self, scaler: Scaler, scale: Any) -> None:
        self._scaler = scaler
        self._generation = scaler.generation
        self._optimizers: list[GradientState] = []
        self.scale = scale

    def join(self, optimizer: GradientState) -> None:
        """Count an optimizer's gradients among these."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def scale_up(self, grads: list[Tensor]) -> None:
        """Bring complete gradients to the scale of these, in place."""
        self._scaler.scale_grads_(grads, self.scale)

    def is_scaled_by(self, scaler: Scaler) -> bool:
        """Whether new gradients of `scaler` may be added: it has not moved since."""
        return self._scaler is scaler and self._generation == scaler.generation

    def finish(self) -> None:
        """Unscale the gradients, and let the scaler know."""
        waiting = [optimizer for optimizer in self._optimizers if optimizer.pending is self]
        sharing = sharing_among(waiting)
        found = [optimizer.unscale_pending(self._scaler, sharing) for optimizer in waiting]
        tell(self._scaler, [flag for flag in found if flag is not None], waiting)


def tell(
    scaler: Scaler,
    flags: list[Flag],
    optimizers: Sequence[GradientState],
    *,
    at_step: bool = False,
) -> None:
    """Have a scaler react to the overflow flags of its gradients, now or at the step.

    Where several processes train it is always at the step: in DDP's `no_sync`
    one rank alone may see an inf, at the step all of them have.
    """
    if at_step or world_size() > 1:
        scaler.defer(flags)
        for optimizer in optimizers:
            optimizer.defer_update(scaler)
    else:
        scaler.update(flags)
