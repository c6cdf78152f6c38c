"""What is known of overflow in the gradients of one optimizer, until a step asks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loss_scaler import Scaler


class Unscaled(NamedTuple):
    """Who unscaled gradients, and by which scale."""

    scaler: Scaler
    scale: Any


class Overflow:
    """Flags of the gradients gathered since the last step, and of those a step has used."""

    def __init__(self) -> None:
        self._found: Tensor | None = None
        self._last: Unscaled | None = None
        self._spent: Unscaled | None = None

    def __bool__(self) -> bool:
        """Whether anything is remembered; no overflow need be."""
        return self._found is not None or self._spent is not None

    def note(self, found: Tensor, by: Unscaled) -> None:
        """Remember a flag: 0-dim, not 0 for an overflow."""
        known = self._found
        self._found = found if known is None else torch.maximum(known, found.to(known.device))
        self._last = by

    def take(self) -> Tensor | None:
        """The flag of what was gathered, which is used from now on; None: unchecked."""
        found, self._found = self._found, None
        self._spent = None if found is None else self._last
        return found

    def take_spent(self) -> Unscaled | None:
        """Who unscaled the gradients that a step has used and nobody zeroed since."""
        spent, self._spent = self._spent, None
        return spent

    def forget(self) -> None:
        """All gradients were zeroed."""
        self._found = self._spent = None
