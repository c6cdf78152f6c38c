"""Functions of a framework's classes that are replaced, and come back when nobody needs that."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..session.facade import PatchSet

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""`(owner, name, make)`, as `PatchSet.replace` takes them."""


class Replaced:
    """Replacements that are in while there is a user of them.

    Args:
        replacements: what to replace.
    """

    def __init__(self, replacements: list[Replacement]) -> None:
        self._replacements = replacements
        self._patches = PatchSet()
        self._users = 0

    def use(self) -> Callable[[], None]:
        """Put them in; what this returns ends the use, and is to be called once."""
        if not self._users:
            for replacement in self._replacements:
                self._patches.replace(*replacement)
        self._users += 1
        return self._end

    def use_while_alive(self, user: Any) -> None:
        """Use them until `user` is collected."""
        weakref.finalize(user, self.use()).atexit = False

    def _end(self) -> None:
        self._users -= 1
        if not self._users:
            self._patches.undo()
