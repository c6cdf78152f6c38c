"""The models, or the optimizers, of one session."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .index import Index

if TYPE_CHECKING:
    from .session import Session

Managed = TypeVar("Managed")


class Members(Generic[Managed]):
    """Managed models or optimizers, held weakly, and in `index` for as long as they are here.

    A model or optimizer keeps its managed counterpart alive (by its hooks or methods), so that
    both can be collected when the user's code drops the object.  `at_end` is called then.
    """

    def __init__(self, session: Session, index: Index, at_end: Callable[[], None]) -> None:
        self._session = weakref.ref(session)  # without a cycle a closed session is freed at once
        self._at_end: Callable[[weakref.ref], None] = lambda member: at_end()
        self._index = index
        self.references: list[weakref.ref[Managed]] = []
        self.unmanaged: list[weakref.ref] = []  # what a disabled session was given

    def add(self, managed: Managed) -> None:
        """A managed model or optimizer joins."""
        self.references = [known for known in self.references if known() is not None]
        self.references.append(weakref.ref(managed, self._at_end))
        self._index.put(self._index.given_of(managed), self._owner(), managed)

    def add_unmanaged(self, given: Iterable[Any]) -> None:
        """Objects join a disabled session, which leaves them as they are."""
        for one in given:
            self.unmanaged.append(weakref.ref(one, self._at_end))
            self._index.put(one, self._owner(), one)

    def alive(self) -> list[Managed]:
        """Those that are still in use."""
        return [managed for ref in self.references if (managed := ref()) is not None]

    def find(self, given: Any) -> Managed | None:
        """The managed counterpart of an object, or None if the object is not in this session."""
        session, managed = self._index.find(given) or (None, None)
        return managed if session is self._owner() else None

    def remove(self, given: Any) -> None:
        """A model or optimizer leaves."""
        self.references = [ref for ref in self.references if not self._is_of(ref, given)]
        self.unmanaged = [ref for ref in self.unmanaged if ref() is not given]
        self._index.remove(given, self._owner())

    def clear(self) -> None:
        """All leave."""
        given = [self._index.given_of(managed) for managed in self.alive()]
        for one in (*given, *self.alive_unmanaged()):
            self._index.remove(one, self._owner())
        self.references, self.unmanaged = [], []

    def alive_unmanaged(self) -> list[Any]:
        """What a disabled session was given, as far as it is still in use."""
        return [given for ref in self.unmanaged if (given := ref()) is not None]

    def is_empty(self) -> bool:
        """Whether all have left; those that were collected have not."""
        return not (self.references or self.unmanaged)

    def are_alive(self) -> bool:
        """Whether any of them is still in use."""
        for reference in (*self.references, *self.unmanaged):
            if reference() is not None:
                return True
        return False

    def _owner(self) -> Session:
        session = self._session()
        assert session is not None  # it holds this object
        return session

    def _is_of(self, reference: weakref.ref[Managed], given: Any) -> bool:
        managed = reference()
        return managed is not None and self._index.given_of(managed) is given
