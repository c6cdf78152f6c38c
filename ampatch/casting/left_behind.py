"""Gives the originals to other code that still holds replacements after the patches are out.

Modules imported while patches were in have bound replacements in every place that a module's
top level can fill: globals, tables keyed by functions, class attributes, defaults.  torch's
own modules are among them (`torch.ao` has tables of functions), so all of these modules
are searched.  Modules imported before are not: they hold what they held.

What else holds a replacement keeps it (a local variable; a mock that restores it later): no policy
is in force any more, and it calls the original.
"""

from __future__ import annotations

import collections
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from ..log import logger

# Of exactly these types: iterating over others may run any code.
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_CONTAINERS = frozenset((*_DICTS, list, set, collections.deque))
_PLAIN = frozenset((str, bytes, int, float, bool, complex, type(None)))
_LARGEST = 100_000  # items: a longer container is data
_MOST = 1_000_000  # objects looked at


class Arrivals:
    """Which modules are imported from now on."""

    def __init__(self) -> None:
        self._known = set(sys.modules)

    def namespaces(self) -> list[dict]:
        """The globals of those there are by now."""
        return [
            object.__getattribute__(module, "__dict__")  # a lazy module is not made to load
            for title in sys.modules.keys() - self._known
            if issubclass(type(module := sys.modules.get(title)), types.ModuleType)
        ]


def give_back_within(namespaces: Iterable[dict], originals: Mapping[int, Any]) -> None:
    """Put originals in the place of replacements (their ids) in all that belongs to modules."""
    namespaces = list(namespaces)
    if namespaces and originals:
        _Walk(namespaces, originals).run()


class _Walk:
    """Through globals, containers, and the classes, functions and objects of these modules."""

    def __init__(self, namespaces: list[dict], originals: Mapping[int, Any]) -> None:
        self._originals = originals
        self._homes = {namespace.get("__name__") for namespace in namespaces}
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = list(namespaces)

    def run(self) -> None:
        while self._waiting:
            value = self._waiting.pop()
            if id(value) in self._seen:
                continue
            if len(self._seen) >= _MOST:
                logger.info("Not all objects of newly imported modules were looked through.")
                return
            self._seen[id(value)] = value
            self._look_into(value)

    def _look_into(self, value: Any) -> None:
        kind = type(value)  # `isinstance` would ask a proxy for its class, and make it load
        if kind in _CONTAINERS:
            if len(value) <= _LARGEST:
                self._refill(value)
        elif issubclass(kind, type):
            if value.__module__ in self._homes:
                for name, held in list(vars(value).items()):
                    new = self._original(held)
                    if new is not held:
                        setattr(value, name, new)
        elif kind is types.FunctionType:
            if value.__module__ in self._homes:
                self._look_into_function(value)
        elif kind.__module__ in self._homes:
            try:
                self._waiting.append(object.__getattribute__(value, "__dict__"))
            except AttributeError:
                return  # an object without attributes of its own

    def _refill(self, container: Any) -> None:
        if isinstance(container, _DICTS):
            self._refill_dict(container)
            return
        found = list(container)
        new = [self._original(item) for item in found]
        if all(map(operator.is_, new, found)):
            return
        if type(container) is set:
            container.clear()
            container.update(new)
        else:
            for index, item in enumerate(new):
                container[index] = item

    def _refill_dict(self, container: dict) -> None:
        found = list(container.items())
        new = [(self._original(key), self._original(held)) for key, held in found]
        if not all(one is key for (one, _), (key, _) in zip(new, found, strict=True)):
            container.clear()  # in the order there was
            container.update(new)
            return
        for (key, held), (_, old) in zip(new, found, strict=True):
            if held is not old:
                container[key] = held

    def _look_into_function(self, function: types.FunctionType) -> None:
        defaults = self._original(function.__defaults__)
        if defaults is not function.__defaults__:
            function.__defaults__ = defaults
        self._waiting.append(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # empty
                continue
            new = self._original(held)
            if new is not held:
                cell.cell_contents = new

    def _original(self, value: Any) -> Any:
        """What is to stand where `value` stands; what may hold replacements waits its turn."""
        if id(value) in self._originals:
            return self._originals[id(value)]
        kind = type(value)
        if kind in (tuple, frozenset) or (issubclass(kind, tuple) and hasattr(kind, "_make")):
            if len(value) > _LARGEST:
                return value
            items = [self._original(item) for item in value]
            return value if all(map(operator.is_, items, value)) else _like(value, items)
        if kind is staticmethod:
            inside = self._original(value.__func__)
            return value if inside is value.__func__ else staticmethod(inside)
        if kind not in _PLAIN and not issubclass(kind, types.ModuleType):
            self._waiting.append(value)
        return value


def _like(found: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or frozen set of `items` in the place of `found`."""
    make = getattr(type(found), "_make", type(found))
    return make(items)
