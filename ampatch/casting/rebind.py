"""Names bound in the user's modules: `from torch.nn.functional import linear`.

What was bound before the patches is rebound, and given back with them.  What
is bound while they are in (a module imported meanwhile) holds a replacement
and gets the original when they go.

Of modules that were there before only globals are looked at, and only through the modules'
dictionaries: asking some modules for an attribute makes them load others.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .left_behind import Arrivals, give_back_within
from .patches import PatchSet

_NOT_THE_USERS = ("torch", "ampatch")


def bound(functions: Iterable[int]) -> list[tuple[dict, str, Any]]:
    """`(globals, name, function)` of each global, outside torch, whose id is in `functions`."""
    wanted = frozenset(functions)
    found = []
    for namespace in _namespaces():
        # Thousands of modules, few hits.  In C throughout, so that no thread can import meanwhile.
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

    So it is with whatever else `arrivals` hold.  To be called when the patches are out.
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


def keep_replaced(
    patches: PatchSet, needed: bool, made_of: Callable[[], list[tuple[Any, str, Callable]]]
) -> None:
    """Have functions replaced, early bound names too, for as long as it is needed.

    `made_of()` lists `(owner, name, make)`.
    """
    if not needed:
        patches.undo()
        patches.hand_over()  # also of what an earlier `undo`, between two sessions, left alone
    elif not len(patches):
        made: dict[int, Any] = {}
        pairs: list[tuple[Any, Any]] = []
        arrivals = Arrivals()
        patches.on_undo(lambda: give_back(pairs, arrivals))
        for owner, name, make in made_of():
            original = patches.replace(owner, name, make)
            put = made[id(original)] = vars(owner)[name]
            pairs.append((put, original))
        rebind(patches, made)
