"""Which replacement stands for which of torch's functions, while the patches are in.

One original has one replacement, under however many names torch keeps it.  Pickle, torch.jit
and Dynamo find functions by name and by identity, and find the replacements.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..torch_private.scripting import builtin_table
from . import rebind
from .patches import PatchSet


class Replacements:
    """Which function replaces which, from the first `put` to `give_back`."""

    def __init__(self, patches: PatchSet) -> None:
        self._patches = patches
        self.pairs: dict[int, tuple[Any, Any]] = {}  # by a replacement's id: it, its original
        self._by_original: dict[int, Any] = {}  # a replacement by the id of its original

    def original(self, function: Any) -> Any:
        """What `function` replaced, if it is a replacement; else `function` itself."""
        while id(function) in self.pairs:
            function = self.pairs[id(function)][1]
        return function

    def of(self, original: Any) -> Any:
        """The replacement of one of torch's functions, or None."""
        return self._by_original.get(id(original))

    def put(self, owner: Any, name: str, make: Callable[[Any], Any], shared: bool = False) -> None:
        """Replace `owner.name` by `make(original)`.

        `shared`: a function that has a replacement already, under another name, gets that one.
        """

        def make_and_register(original: Any) -> Any:
            found = self._by_original.get(id(original)) if shared else None
            if found is not None:
                return found
            made = make(original)
            _name_after_place(made, original, owner, name)
            self.pairs[id(made)] = (made, original)
            self._by_original.setdefault(id(original), made)
            self._register_for_script(made, original)
            return made

        self._patches.replace(owner, name, make_and_register)

    def _register_for_script(self, made: Any, original: Any) -> None:
        table = builtin_table()
        if id(original) in table:
            table[id(made)] = table[id(original)]
            self._patches.on_undo(lambda: table.pop(id(made), None))

    def rebind(self, *originals: Any) -> None:
        """Bind modules' names for these originals (none given: for all) to their replacements."""
        chosen = map(id, originals) if originals else self._by_original
        rebind.rebind({key: (self._patches, self._by_original[key]) for key in chosen})

    def give_back(self) -> None:
        """The patches are out: bind the user's names for replacements to the originals again."""
        if self.pairs:
            rebind.give_back((made, self.original(made)) for made, _ in self.pairs.values())
        self.pairs.clear()
        self._by_original.clear()


def _name_after_place(made: Any, original: Any, owner: Any, name: str) -> None:
    """Name a replacement after its place, so that pickle stores it by reference to it."""
    if inspect.isfunction(original):  # jit reads the source behind __wrapped__, so not for builtins
        functools.update_wrapper(made, original)
        return
    is_class = inspect.isclass(owner)
    made.__name__ = name
    made.__qualname__ = f"{owner.__name__}.{name}" if is_class else name
    made.__module__ = owner.__module__ if is_class else owner.__name__
    made.__doc__ = getattr(original, "__doc__", None)
