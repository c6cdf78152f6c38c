"""Half weights whose masters' memory is in somebody's hands, and what was in them.

Who writes into a master by numpy, a collective or `.data` of an alias raises no version.  A copy of
the half weight from when both agreed tells then which of the two was written into.  It is kept
until both are compared, and renewed for as long as an alias that was handed out is alive.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from .comparison import is_unchanged


class Shown:
    """The copies, by the half weights; false while there are none."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __contains__(self, half: Tensor) -> bool:
        return id(half) in self._copies

    def add(self, half: Tensor, alias: Tensor | None) -> None:
        """The master of `half` is shown, by `alias` or (None) itself."""
        self._copies[id(half)] = half.detach().clone()
        if alias is not None:
            self._aliases[id(half)] = [*self._living(half), weakref.ref(alias)]

    def expect(self, half: Tensor, values: Tensor) -> None:
        """`half` is about to hold `values`, which its master rounds to already."""
        self._copies[id(half)] = values

    def is_unchanged(self, half: Tensor) -> bool:
        """Whether `half`, one of these, is what its copy is.  Waits for the device."""
        return is_unchanged(half, self._copies[id(half)])

    def renew(self, half: Tensor) -> None:
        """`half` agrees with its master: forget its copy, or make it anew if an alias is alive."""
        if half in self:
            living = self._living(half)
            if living:
                self._copies[id(half)] = half.detach().clone()
                self._aliases[id(half)] = living
            else:
                self.forget(half)

    def renew_all(self, halves: list[Tensor]) -> None:
        """As `renew`, for all."""
        for half in halves:
            self.renew(half)

    def forget(self, half: Tensor) -> None:
        """It is no longer one of them."""
        self._copies.pop(id(half), None)
        self._aliases.pop(id(half), None)

    def _living(self, half: Tensor) -> list[weakref.ref[Tensor]]:
        return [alias for alias in self._aliases.get(id(half), ()) if alias() is not None]
