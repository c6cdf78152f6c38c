"""Writes by the user's code into some tensors since they were last noted, as far as is known.

A version tells most of them.  `.data` gives an alias with a version of its own, which is kept here
and asked too.  What raises neither (collectives, numpy) leaves at most the knowledge that
`.data` was read, and may have been written through.
"""

from __future__ import annotations

import sys

from torch import Tensor

from ..tensor_lists import versions

_OURS = 3  # references to an alias without a holder outside: list, loop, question


class Writes:
    """Versions of tensors, by their ids, and aliases that `.data` gave out."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._noted: list[Tensor] | None = None  # whose versions are in `_in_order` alone
        self._in_order: list[int] | None = []  # the same, in the order of `moved`
        self._aliases: dict[int, list[tuple[Tensor, int]]] = {}
        self._held: set[int] = set()  # ids of tensors whose `.data` was read since noted
        self._given: set[int] = set()  # and that were given other data

    @property
    def is_touched(self) -> bool:
        """Whether `.data` of any of them was read or replaced, or an alias from before written."""
        return bool(self._held or self._given) or any(
            alias._version != seen for known in self._aliases.values() for alias, seen in known
        )

    def touched(self, tensor: Tensor, data: Tensor | None) -> None:
        """`.data` of a tensor was read and gave `data`, or (None) was replaced."""
        if data is None:
            self._given.add(id(tensor))
        else:
            self._held.add(id(tensor))
            self._aliases.setdefault(id(tensor), []).append((data, data._version))

    def moved(self, tensors: list[Tensor]) -> bool:
        """Whether any version has risen; `tensors` are all there are, in the order they came."""
        if self._in_order is None:
            self._in_order = list(self._versions.values())
        return versions(tensors) != self._in_order

    def is_new(self, tensor: Tensor) -> bool:
        """Whether it is known that the tensor was written into, or given other data."""
        key = id(tensor)
        return (
            tensor._version != self._by_id().get(key)
            or key in self._given
            or any(alias._version != seen for alias, seen in self._aliases.get(key, ()))
        )

    def may_be_new(self, tensor: Tensor) -> bool:
        """Whether it was written into, or may have been, its `.data` having been read."""
        return id(tensor) in self._held or self.is_new(tensor)

    def note(self, tensors: list[Tensor]) -> None:
        """What is in these tensors now is known."""
        for tensor in tensors:
            self._by_id()[id(tensor)] = tensor._version
            self._note_aliases(tensor)
        self._in_order = None

    def note_all(self, tensors: list[Tensor]) -> None:
        """As `note`, for all there are, in the order in which `moved` will be asked."""
        self._in_order = versions(tensors)
        self._noted = tensors
        if self._aliases or self._given:
            for tensor in tensors:
                self._note_aliases(tensor)

    def forget(self, tensor: Tensor) -> None:
        """The tensor is no longer one of them."""
        self._by_id().pop(id(tensor), None)
        self._note_aliases(tensor)
        self._aliases.pop(id(tensor), None)
        self._in_order = None

    def _by_id(self) -> dict[int, int]:
        if self._noted is not None and self._in_order is not None:
            self._versions = dict(zip(map(id, self._noted), self._in_order, strict=True))
        self._noted = None
        return self._versions

    def _note_aliases(self, tensor: Tensor) -> None:
        """Keep the newest alias, which may have views, and those that are held outside."""
        key = id(tensor)
        self._held.discard(key)
        self._given.discard(key)
        aliases = self._aliases.pop(key, None)
        if aliases is None:
            return
        place = tensor.data_ptr()
        last = len(aliases) - 1
        kept = [
            (alias, alias._version)
            for index, (alias, _) in enumerate(aliases)
            if (index == last or sys.getrefcount(alias) > _OURS) and alias.data_ptr() == place
        ]
        if kept:
            self._aliases[key] = kept
