"""Which session has which optimizer and model: one look-up, however many sessions are open."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session


class Index:
    """Finds the session of an object that `initialize` was given, and its managed counterpart.

    The counterpart is held weakly, and `given_of(counterpart)` is the object; an entry goes when
    its counterpart dies.  An object is in one session at a time: the one that put it last.
    """

    def __init__(self, given_of: Callable[[Any], Any]) -> None:
        self.given_of = given_of
        self._entries: dict[int, tuple[Session, weakref.ref]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, given: Any, session: Session, managed: Any) -> None:
        """`given` is in `session` from now on.  Without a counterpart `managed` is `given`."""
        key, entries = id(given), self._entries

        def remove(reference: weakref.ref) -> None:
            entry = entries.get(key)
            if entry is not None and entry[1] is reference:
                del entries[key]

        entries[key] = (session, weakref.ref(managed, remove))

    def find(self, given: Any) -> tuple[Session, Any] | None:
        """`(session, managed counterpart or None)`; None for an object in no session."""
        entry = self._entries.get(id(given))
        if entry is None:
            return None
        managed = entry[1]()
        if managed is given:
            return entry[0], None
        if managed is None or self.given_of(managed) is not given:  # dying, its id is used again
            return None
        return entry[0], managed

    def session_of(self, given: Any) -> Session | None:
        """The session that an object is in, or None."""
        found = self.find(given)
        return None if found is None else found[0]

    def managed(self, given: Any) -> Any:
        """The managed counterpart of an object, or None."""
        found = self.find(given)
        return None if found is None else found[1]

    def remove(self, given: Any, session: Session) -> None:
        """`given` has left `session`; nothing happens if another one has it by now."""
        entry = self._entries.get(id(given))
        if entry is not None and entry[0] is session:
            del self._entries[id(given)]
