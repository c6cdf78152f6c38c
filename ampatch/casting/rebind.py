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

from .left_behind import Arrivals, give_back_within
from .patches import PatchSet

_NOT_THE_USERS = ("torch", "ampatch")


def bound(functions: Iterable[int]) -> list[tuple[dict, str, Any]]:
    """`(globals, name, function)` of each global, outside torch, whose id is in `functions`."""
    wanted = frozenset(functions)
    found = []
    for namespace in _namespaces():
        # Thousands of modules, few hits.  In C throughout: no other thread can import during it.
        if not wanted.isdisjoint(map(id, namespace.values())):
            found += [
                (namespace, name, value)
                for name, value in list(namespace.items())
                if id(value) in wanted
            ]
    return found


def rebind(patches: PatchSet, replacements: Mapping[int, Any]) -> None:
    """Bind each global that is an original (its id) to its replacement, until `patches.undo`."""
    for namespace, name, value in bound(replacements):
        patches.rebind(namespace, name, replacements[id(value)])


def give_back(pairs: Iterable[tuple[Any, Any]], arrivals: Arrivals) -> None:
    """Bind each global that still is a replacement to its original, `pairs` of these two.

    Containers, classes and functions in `arrivals` get originals too.  To be called when the
    patches are out.
    """
    pairs = list(pairs)
    originals = {id(replacement): original for replacement, original in pairs}
    give_back_within(arrivals.namespaces(), originals)
    for namespace, name, value in bound(originals):
        namespace[name] = originals[id(value)]


def _namespaces() -> Iterator[dict]:
    for title, module in list(sys.modules.items()):
        if _is_module(module):
            namespace = object.__getattribute__(module, "__dict__")
            name = namespace.get("__name__")  # the title may be an alias of a module of torch's
            home = name if isinstance(name, str) else title
            if home.partition(".")[0] not in _NOT_THE_USERS:
                yield namespace


def _is_module(value: Any) -> bool:
    """Whether it is a real module; `isinstance` would ask a proxy for its class, and load it."""
    return issubclass(type(value), types.ModuleType)
