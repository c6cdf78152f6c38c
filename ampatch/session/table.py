"""Who manages this module, or this optimizer?  The one table of the process that answers it."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from ..models.managed_model import ManagedModel

Session = TypeVar("Session")
Managed = TypeVar("Managed")
Rows = dict[int, "weakref.ref[Managed]"]
"""Managed counterparts, or what a disabled session was given, by the ids of the given objects."""


class Table(Generic[Session]):
    """The session of each object that `initialize` was given, and its managed counterpart.

    An object keeps its counterpart alive (by its hooks or methods), and the counterpart holds the
    object.  The table holds the counterpart weakly.  So both are collected when the user's code
    drops the object, and its row goes.  A disabled session changes nothing, and an object there is
    its own counterpart.  An object is in one session at a time: the one that put it last.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Session, weakref.ref]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, given: Any, session: Session, managed: Managed) -> weakref.ref[Managed]:
        """`given` is in `session` from now on; returns a weak reference to its counterpart."""
        key, rows = id(given), self._rows

        def collected(counterpart: weakref.ref) -> None:
            row = rows.get(key)
            if row is not None and row[1] is counterpart:
                del rows[key]

        held = weakref.ref(managed, collected)
        rows[key] = (session, held)
        return held

    def remove(self, key: int, session: Session) -> None:
        """An object, by its id, has left `session`; another one may have it by now."""
        row = self._rows.get(key)
        if row is not None and row[0] is session:
            del self._rows[key]

    def find(self, given: Any) -> tuple[Session, Any] | None:
        """`(session, managed counterpart or None)`; None for an object in no session."""
        row = self._rows.get(id(given))
        if row is None:
            return None
        managed = row[1]()
        if managed is None:  # collected, and not gone yet
            return None
        return row[0], None if managed is given else managed

    def find_optimizer(self, given: Any) -> tuple[Session, Any] | None:
        """As `find`, for an optimizer, or for what frameworks hand out in its place."""
        found = self.find(given)
        if found is None:
            found = self.find(self.optimizer_behind(given))
        return None if found is None or isinstance(found[1], ManagedModel) else found

    def optimizer_behind(self, given: Any) -> Any:
        """The optimizer of a session that `given` stands for, else `given` itself.

        accelerate's `AcceleratedOptimizer` and Lightning's `LightningOptimizer` have the optimizer
        as `.optimizer` and share its `param_groups`.  A scheduler has one, and is none.
        """
        one, tried = given, set()
        while self.find(one) is None:
            tried.add(id(one))
            inner = getattr(one, "optimizer", None)
            groups = getattr(one, "param_groups", None)
            if inner is None or groups is None or id(inner) in tried:
                return given
            if groups is not getattr(inner, "param_groups", None):
                return given
            one = inner
        return one

    def session_of(self, given: Any) -> Session | None:
        """The session that an object is in, or None."""
        found = self.find(given)
        return None if found is None else found[0]

    def managed(self, given: Any) -> Any:
        """The managed counterpart of an object, or None."""
        found = self.find(given)
        return None if found is None else found[1]


def alive(*rows: Rows[Managed]) -> list[Managed]:
    """Those counterparts that are still in use."""
    return [
        managed for some in rows for held in list(some.values()) if (managed := held()) is not None
    ]
