"""The user's functions that follow a rule, from `register` to `forget`.

Registrations outlive sessions: a script registers once, at its top.  The functions are patched
while patches are in, and are what they were while none are.
"""

from __future__ import annotations

from typing import Any

from . import user_functions
from .install import Installation
from .places import raw_attribute, user_place
from .tables import Rule


class RegisteredFunctions:
    """Where the user's functions are, and their rules."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._rules: dict[tuple[Any, str], Rule] = {}  # by owner and name

    def register(self, place: Any, name: str | None, rule: Rule) -> bool:
        """Have a function follow a rule from now on.  Returns whether patches are out of date.

        Raises `AttributeError` if its module has no such name, `TypeError` for something that
        cannot follow a rule.
        """
        call = f"ampatch.register_{rule.value}_function"
        owner, attribute = user_place(call, place, name)
        if not hasattr(owner, attribute):
            raise AttributeError(
                f"{_title(owner)} has no attribute {attribute!r}; nothing was registered."
            )
        what = f"{call}({_title(owner)}, {attribute!r})"
        user_functions.check(raw_attribute(owner, attribute), what)
        known = self._rules.get((owner, attribute))
        self._rules[owner, attribute] = rule
        if known is None and self._installation.has_tables:
            self._installation.put_user_function(owner, attribute, rule)
        return known not in (None, rule)

    def forget(self, place: Any, name: str | None) -> None:
        """Take a registration back.  Raises `ValueError` if there is none."""
        call = "ampatch.unregister_function"
        owner, attribute = user_place(call, place, name)
        if self._rules.pop((owner, attribute), None) is None:
            known = [f"{_title(owner)}.{attribute}" for owner, attribute in self._rules]
            raise ValueError(
                f"{call}: {_title(owner)}.{attribute} is not registered. "
                f"Registered: {', '.join(known) or 'nothing'}."
            )

    def put_all(self) -> None:
        """The tables have been installed: patch these functions too."""
        for (owner, name), rule in self._rules.items():
            self._installation.put_user_function(owner, name, rule)


def _title(owner: Any) -> Any:
    return getattr(owner, "__name__", owner)
