"""Half weights whose masters were handed out to the user's code, with copies from that time.

A write into a master by numpy, a collective or `.data` of an alias raises no version.  A copy of
the half weight from when both agreed tells then which of the two was written into.  It is kept
until both are compared, and renewed for as long as an alias that was handed out is alive.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from .comparison import is_unchanged


class HandedOut:
    """The copies of half weights; `copies` has them by the weights' ids, for reading."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}

    def add(self, half: Tensor, alias: Tensor | None) -> None:
        """The master of `half` is handed out, as `alias` or (None) itself."""
        self.copies[id(half)] = half.detach().clone()
        if alias is not None:
            self._aliases[id(half)] = [*self._living(half), weakref.ref(alias)]

    def expect(self, half: Tensor, values: Tensor) -> None:
        """`half` is about to hold `values`, which its master rounds to already."""
        self.copies[id(half)] = values

    def is_unchanged(self, half: Tensor) -> bool:
        """Whether `half`, one of these, is what its copy is.  Waits for the device."""
        return is_unchanged(half, self.copies[id(half)])

    def renew(self, half: Tensor) -> None:
        """`half` agrees with its master: forget its copy, or make it anew if an alias is alive."""
        if id(half) in self.copies:
            living = self._living(half)
            if living:
                self.copies[id(half)] = half.detach().clone()
                self._aliases[id(half)] = living
            else:
                self.forget(half)

    def forget(self, half: Tensor) -> None:
        """It is no longer one of them."""
        self.copies.pop(id(half), None)
        self._aliases.pop(id(half), None)

    def _living(self, half: Tensor) -> list[weakref.ref[Tensor]]:
        return [alias for alias in self._aliases.get(id(half), ()) if alias() is not None]
