"""The process's registry: which session manages a model or an optimizer, through which object."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from ..models.managed_model import ManagedModel

SessionT = TypeVar("SessionT")
Managed = TypeVar("Managed")
ManagedRefs = dict[int, "weakref.ref[Managed]"]
"""Weak references to the managed counterparts, by the id of the user's object.

In a disabled session, the counterpart is the object itself.
"""


class ObjectRegistry(Generic[SessionT]):
    """The session and the managed counterpart of each object that was passed to `initialize`.

    The object (in its hooks or methods) and its counterpart refer to each other.  The registry has
    a weak reference to the counterpart.  When the user's code drops the object, both are collected,
    and the entry is removed.  In a disabled session, an object is its own counterpart.  An object
    is in one session at a time, the one that called `put` last.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[SessionT, weakref.ref]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, obj: Any, session: SessionT, managed: Managed) -> weakref.ref[Managed]:
        """Record that `obj` is in `session`.  Returns a weak reference to its counterpart."""
        key = id(obj)
        entries = self._entries

        def collected(counterpart: weakref.ref) -> None:
            _, current = entries.get(key, (None, None))
            if current is counterpart:
                del entries[key]

        ref = weakref.ref(managed, collected)
        entries[key] = (session, ref)
        return ref

    def remove(self, key: int, session: SessionT) -> None:
        """Remove the entry of an object (its id), unless another session than `session` has it."""
        owner, _ = self._entries.get(key, (None, None))
        if owner is session:
            del self._entries[key]

    def find(self, obj: Any) -> tuple[SessionT, Any] | None:
        """Return `(session, counterpart)`, or None if the object is in no session.

        The counterpart is None in a disabled session.
        """
        entry = self._entries.get(id(obj))
        if entry is None:
            return None
        session, counterpart = entry
        managed = counterpart()
        if managed is None:  # garbage-collected: `collected` is about to remove the entry
            return None
        return session, None if managed is obj else managed

    def find_optimizer(self, optimizer: Any) -> tuple[SessionT, Any] | None:
        """Like `find`, but for an optimizer or a framework's object that wraps one."""
        entry = self.find(optimizer)
        if entry is None:
            entry = self.find(self.unwrapped_optimizer(optimizer))
        return None if entry is None or isinstance(entry[1], ManagedModel) else entry

    def unwrapped_optimizer(self, optimizer: Any) -> Any:
        """Return a session's optimizer for which `optimizer` stands, else `optimizer` itself.

        accelerate's `AcceleratedOptimizer` and Lightning's `LightningOptimizer` have the optimizer
        as `.optimizer` and share its `param_groups`.  A scheduler has no `param_groups`.
        """
        candidate = optimizer
        tried = set()
        while self.find(candidate) is None:
            tried.add(id(candidate))
            inner = getattr(candidate, "optimizer", None)
            groups = getattr(candidate, "param_groups", None)
            if inner is None or groups is None or id(inner) in tried:
                return optimizer
            if groups is not getattr(inner, "param_groups", None):
                return optimizer
            candidate = inner
        return candidate

    def session_of(self, obj: Any) -> SessionT | None:
        """The session that an object is in, or None."""
        session, _ = self.find(obj) or (None, None)
        return session

    def managed(self, obj: Any) -> Any:
        """The managed counterpart of an object, or None."""
        _, managed = self.find(obj) or (None, None)
        return managed


def live_counterparts(*entries: ManagedRefs[Managed]) -> list[Managed]:
    """The counterparts that are not yet garbage-collected."""
    return [
        managed for refs in entries for ref in list(refs.values()) if (managed := ref()) is not None
    ]
