"""The user's functions that follow a rule, from `register` to `forget`.

Registrations outlive sessions: a script registers once, at its top.  The functions are patched
while patches are in, and are what they were while none are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import wrapt

from ..log import logger
from . import user_functions
from .install import Installation
from .places import parse_place, raw_attribute, resolve_user_place
from .tables import Rule


class _Place(NamedTuple):
    """A function by its owner, a module or class or the dotted name of one, and its name there."""

    owner: Any
    name: str

    def is_at(self, other: _Place) -> bool:
        """Whether both name the same function, in whatever way."""
        if self.name != other.name:
            return False
        mine, theirs = resolve_user_place(self.owner), resolve_user_place(other.owner)
        if mine is None or theirs is None:
            return self.owner == other.owner
        return mine is theirs

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


class RegisteredFunctions:
    """Where the user's functions are, and their rules."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._rules: list[tuple[_Place, Rule]] = []
        self._awaited: set[str] = set()  # modules: asked for once, however many sessions wait

    def register(self, place: Any, name: str | None, rule: Rule) -> bool:
        """Have a function follow a rule from now on; whether patches in force are out of date.

        Raises `AttributeError` if the module is there and the name is not, `TypeError`
        for something that cannot follow a rule.
        """
        call = f"ampatch.register_{rule.value}_function"
        new = _Place(*parse_place(call, place, name))
        resolved = resolve_user_place(new.owner)
        if resolved is not None:
            title = getattr(resolved, "__name__", resolved)
            if not hasattr(resolved, new.name):
                raise AttributeError(
                    f"{title} has no attribute {new.name!r}; nothing was registered."
                )
            what = f"{call}({title}, {new.name!r})"
            user_functions.check(raw_attribute(resolved, new.name), what)
        known = next((entry for entry in self._rules if entry[0].is_at(new)), None)
        if known is not None and known[1] is rule:
            return False
        if known is not None:
            self._rules[self._rules.index(known)] = (new, rule)
            return True
        self._rules.append((new, rule))
        if self._installation.has_tables:
            self._put(new, rule)
        return False

    def forget(self, place: Any, name: str | None) -> None:
        """Take a registration back.  Raises `ValueError` if there is none."""
        given = _Place(*parse_place("ampatch.unregister_function", place, name))
        kept = [entry for entry in self._rules if not entry[0].is_at(given)]
        if len(kept) == len(self._rules):
            known = ", ".join(str(place) for place, _ in self._rules) or "nothing"
            raise ValueError(
                f"ampatch.unregister_function: {given} is not registered. Registered: {known}."
            )
        self._rules = kept

    def put_all(self) -> None:
        """The tables have been installed: patch these functions too."""
        for place, rule in self._rules:
            self._put(place, rule)

    def _put(self, place: _Place, rule: Rule) -> None:
        resolved = resolve_user_place(place.owner)
        if resolved is not None:
            self._installation.put_user_function(resolved, place.name, rule)
        elif place.owner not in self._awaited:
            self._awaited.add(place.owner)
            logger.info("%s will be patched when %s is imported.", place, place.owner)
            wrapt.register_post_import_hook(lambda _: self._arrived(place.owner), place.owner)

    def _arrived(self, title: str) -> None:
        self._awaited.discard(title)
        if self._installation.has_tables:
            for place, rule in self._rules:
                if place.owner == title:
                    self._put(place, rule)
