"""Which tensor of a pair the user's code wrote into: the half weight, its master, or both."""

from __future__ import annotations

from .comparison import Pair
from .handed_out import HandedOut
from .writes import Writes


class Writers:
    """What is known of writes into pairs since they were last noted.

    The parts are there for callers that ask about all pairs at once.
    """

    def __init__(self) -> None:
        self.halves = Writes()
        self.masters = Writes()
        self.handed_out = HandedOut()

    def note(self, pair: Pair) -> None:
        """Both agree as they are now."""
        self.halves.note([pair.half])
        self.masters.note([pair.master])
        if self.handed_out.copies:
            self.handed_out.renew(pair.half)

    def forget(self, pair: Pair) -> None:
        """The pair is no more."""
        self.handed_out.forget(pair.half)
        self.halves.forget(pair.half)
        self.masters.forget(pair.master)

    def is_suspect(self, pair: Pair) -> bool:
        """Whether the master of this pair may have been written into."""
        return id(pair.half) in self.handed_out.copies or self.masters.may_be_new(pair.master)

    def of(self, pair: Pair) -> tuple[bool, bool]:
        """Whether the half weight was written into, and whether the master, as far as is known."""
        half, master = pair
        by_half, by_master = self.halves.is_new(half), self.masters.is_new(master)
        if id(half) in self.handed_out.copies:
            by_half = not self.handed_out.is_unchanged(half)
            return by_half, by_master or not by_half
        if not by_half and not self.halves.may_be_new(half):
            by_master = self.masters.may_be_new(master)
        return by_half, by_master
