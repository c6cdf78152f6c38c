"""Names bound in the user's modules: `from torch.nn.functional import linear`.

A name bound before the patches is bound to the replacement, and to the original again when
the patches go.  A name bound while they are installed (by a module imported then) holds a
replacement, and gets the original when they go.

In modules imported before, only globals are looked at, and only through the modules'
dictionaries: asking some modules for an attribute makes them load others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .patches import PatchSet

NOT_SEARCHED = {"torch", "ampatch"}
"""Packages in whose modules, by name or title in `sys.modules`, no name is rebound."""


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


Bind = Callable[[dict, str, Any], None]
"""`bind(globals, name, value)`."""


class _Exchange(NamedTuple):
    """Globals to exchange: new values by ids of old ones, which `alive` keeps from being reused."""

    new_of: Mapping[int, Any]
    bind: Bind
    alive: Any


class _Searches(threading.local):
    def __init__(self) -> None:
        self.waiting: list[_Exchange] | None = None  # in the order they came; None: no `one_search`


_searches = _Searches()


@contextlib.contextmanager
def one_search() -> Iterator[None]:
    """Context manager: `rebind` and `give_back` inside share one search, made when it ends."""
    if _searches.waiting is not None:
        yield
        return
    waiting = _searches.waiting = []
    try:
        yield
    finally:
        _searches.waiting = None
        _search(waiting)


def _search(exchanges: list[_Exchange]) -> None:
    """Do these exchanges in one search, with the outcome of one search for each, in turn."""
    ids = {key for exchange in exchanges for key in exchange.new_of}
    for namespace, name, found in bound(ids) if ids else ():
        value = found
        for exchange in exchanges:
            if id(value) in exchange.new_of:
                value = exchange.new_of[id(value)]
                exchange.bind(namespace, name, value)


def _exchange(exchange: _Exchange) -> None:
    if _searches.waiting is None:
        _search([exchange])
    else:
        _searches.waiting.append(exchange)


def rebind(patches: PatchSet, replacements: Mapping[int, Any]) -> None:
    """Bind each global that is an original (its id) to its replacement, until `patches.undo`."""
    _exchange(_Exchange(dict(replacements), patches.rebind, patches))


def give_back(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Bind each global that still is a replacement to its original, `pairs` of these two.

    To be called when the patches are out.  Containers, classes and functions that hold a
    replacement keep it: no policy is in force any more, and it calls the original.
    """
    pairs = list(pairs)
    originals = {id(replacement): original for replacement, original in pairs}
    _exchange(_Exchange(originals, dict.__setitem__, pairs))


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
