"""What is known of overflow in the gradients of one optimizer, until a step asks."""

from __future__ import annotations

from typing import Any, NamedTuple

from .loss_scaler import Scaler
from .scale_value import Flag, either


class Unscaled(NamedTuple):
    """Who unscaled gradients, and by which scale."""

    scaler: Scaler
    scale: Any


class Overflow:
    """Flags of the gradients gathered since the last step, and of those a step has used.

    `found` and `spent` are None where there is nothing to remember.
    """

    __slots__ = ("_last", "found", "spent")

    def __init__(self) -> None:
        self.found: Flag | None = None
        self.spent: Unscaled | None = None  # who unscaled gradients that nobody zeroed since a step
        self._last: Unscaled | None = None

    def __bool__(self) -> bool:
        """Whether anything is remembered; no overflow need be."""
        return self.found is not None or self.spent is not None

    def note(self, found: Flag, by: Unscaled) -> None:
        """Remember a flag."""
        self.found = found if self.found is None else either(self.found, found)
        self._last = by

    def take(self) -> Flag | None:
        """The flag of what was gathered, which is used from now on; None: unchecked."""
        found, self.found = self.found, None
        self.spent = None if found is None else self._last
        return found

    def take_spent(self) -> Unscaled | None:
        """Who unscaled the gradients that a step has used and nobody zeroed since."""
        spent, self.spent = self.spent, None
        return spent

    def forget(self) -> None:
        """All gradients were zeroed."""
        self.found = self.spent = None
