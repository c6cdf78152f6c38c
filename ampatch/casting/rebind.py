"""Names bound in the user's modules: `from torch.nn.functional import linear`.

A name bound before the patches is bound to the replacement, and to the original again when
the patches go.  A name bound while they are installed (by a module imported then) holds a
replacement, and gets the original when they go.

In modules imported before, only globals are looked at, and only through the modules'
dictionaries: asking some modules for an attribute makes them load others.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .patches import PatchSet

NOT_SEARCHED = {"torch", "ampatch"}
"""Packages in whose modules, by name or title in `sys.modules`, no name is rebound."""


def bound(functions: Iterable[int]) -> list[tuple[dict, str, Any]]:
    """`(globals, name, function)` of each global, outside torch, whose id is in `functions`."""
    wanted = frozenset(functions)
    found = []
    for namespace in _namespaces() if wanted else ():
        # Thousands of modules, few hits.  In C throughout: no other thread can import during it.
        if not wanted.isdisjoint(map(id, namespace.values())):
            found += [
                (namespace, name, value)
                for name, value in list(namespace.items())
                if id(value) in wanted
            ]
    return found


def rebind(replacements: Mapping[int, tuple[PatchSet, Any]]) -> None:
    """Bind each global that is an original (its id) to its replacement, until `patches.undo`.

    `replacements` has, by an original's id, the patches that undo it and the replacement, which
    may be replaced in turn.
    """
    for namespace, name, value in bound(replacements):
        while id(value) in replacements:
            patches, value = replacements[id(value)]
            patches.rebind(namespace, name, value)


def give_back(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Bind each global that still is a replacement to its original, `pairs` of these two.

    To be called when the patches are out.  Containers, classes and functions that hold a
    replacement keep it: no policy is in force any more, and it calls the original.
    """
    pairs = list(pairs)  # which keep the ids from being reused
    originals = {id(replacement): original for replacement, original in pairs}
    for namespace, name, value in bound(originals):
        while id(value) in originals:
            value = namespace[name] = originals[id(value)]


_passed_by: set[str] = set()  # titles of modules of `NOT_SEARCHED`, most of what is imported


def _namespaces() -> Iterator[dict]:
    for title in sorted(sys.modules.keys() - _passed_by):
        if title.partition(".")[0] in NOT_SEARCHED:
            _passed_by.add(title)
            continue
        module = sys.modules.get(title)
        if _is_module(module):
            namespace = object.__getattribute__(module, "__dict__")
            name = namespace.get("__name__")  # the title may be an alias of a module of torch's
            home = name if isinstance(name, str) else title
            if home.partition(".")[0] not in NOT_SEARCHED:
                yield namespace
                if title == "__mp_main__":
                    yield from _of_functions(namespace)


def _of_functions(namespace: dict) -> list[dict]:
    """The globals that functions of a spawned process's main script have.

    `multiprocessing` runs the script in a module that it drops, and copies what is in it.
    """
    found = {
        id(value.__globals__): value.__globals__
        for value in list(namespace.values())
        if type(value) is types.FunctionType and value.__module__ == "__mp_main__"
    }
    return [one for one in found.values() if one is not namespace]


def _is_module(value: Any) -> bool:
    """Whether it is a real module; `isinstance` would ask a proxy for its class, and load it."""
    return issubclass(type(value), types.ModuleType)
