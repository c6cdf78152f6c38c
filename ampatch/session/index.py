"""Who has which object in care: one look-up, however many sessions are open."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .members import Members


class Whereabouts:
    """Finds, for an object given to `initialize`, the session that has it and our side of it.

    Our side is held weakly and `given_of(ours)` is the object; an entry goes when it dies.
    An object is with one session at a time: the one that put it last.
    """

    def __init__(self, given_of: Callable[[Any], Any]) -> None:
        self._given_of = given_of
        self._of: dict[int, tuple[Members, weakref.ref]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def put(self, given: Any, session: Members, ours: Any) -> None:
        """`session` takes `given` into care.  Without a side of ours, `ours` is `given` itself."""
        key, of = id(given), self._of

        def gone(reference: weakref.ref) -> None:
            entry = of.get(key)
            if entry is not None and entry[1] is reference:
                del of[key]

        of[key] = (session, weakref.ref(ours, gone))

    def find(self, given: Any) -> tuple[Any, Any] | None:
        """`(session, our side or None)`, or None for an object in nobody's care."""
        entry = self._of.get(id(given))
        if entry is None:
            return None
        ours = entry[1]()
        if ours is given:
            return entry[0], None
        if ours is None or self._given_of(ours) is not given:  # dying, its id used again
            return None
        return entry[0], ours

    def session_of(self, given: Any) -> Any:
        """The session that has an object, or None."""
        found = self.find(given)
        return None if found is None else found[0]

    def ours(self, given: Any) -> Any:
        """Our side of an object, or None."""
        found = self.find(given)
        return None if found is None else found[1]

    def remove(self, given: Any, session: Members) -> None:
        """`session` has `given` in care no longer."""
        entry = self._of.get(id(given))
        if entry is not None and entry[0] is session:
            del self._of[id(given)]
