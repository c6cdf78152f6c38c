"""The dicts and sets of torch's functions that handlers keep, filled before the session.

`@implements(torch.nn.functional.linear)` at the top of a module puts the original into a dict.
While patches are installed, the handler of `__torch_function__` is called with the replacement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

from ..torch_private.torch_functions import C_NN, C_NN_NAME, NESTED_TENSORS

_METHODS = (MethodType, classmethod, staticmethod)
_MAX_DEPTH = 4
_MAX_ITEMS = 64


Container = dict | set


class HandlerContainers:
    """Dicts and sets in which handlers look up the function that they are called with.

    A container that has an original gets an entry for the replacement too, with the same value,
    until `restore`.  If the user's code has added an entry for a replacement, `restore` makes it an
    entry of the original.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], tuple[Container, Callable, Callable, bool]] = {}

    def add_replacement(self, original: Callable, patched: Callable, holder: Any) -> bool:
        """Add the replacement to the containers of a handler.

        Returns whether the handler must be called with the original, because the handler knows only
        the original, from an object that cannot be extended.  `holder` is the
        TorchFunctionMode or the tensor to which the handler belongs.
        """
        if type(holder).__module__ == NESTED_TENSORS:
            return _names_builtin({C_NN_NAME, original.__name__}, original)
        search = _Search(original, patched)
        handler = holder.__torch_function__
        search.in_function(getattr(handler, "__func__", handler), 0)
        for cls in type(holder).__mro__:
            if cls not in _BASE_CLASSES:
                search.in_values(vars(cls).values(), 1)
        if isinstance(holder, TorchFunctionMode):
            search.in_values(vars(holder).values(), 1)
        for container in search.patched_containers:
            self._entries.setdefault(
                (id(container), id(patched)), (container, original, patched, False)
            )
        if search.has_patched:
            return False
        for container in search.containers:
            self._entries[id(container), id(patched)] = (container, original, patched, True)
            if isinstance(container, dict):
                container[patched] = container[original]
            else:
                container.add(patched)
        return search.has_original

    def restore(self) -> None:
        """Remove the replacements from the containers."""
        for container, original, patched, is_ours in self._entries.values():
            if patched not in container:
                continue
            if isinstance(container, dict):
                value = container.pop(patched)
                if not is_ours or value is not container.get(original, value):
                    container[original] = value
            else:
                container.remove(patched)
                container.add(original)
        self._entries.clear()


_BASE_CLASSES = frozenset((*torch.nn.Parameter.__mro__, *TorchFunctionMode.__mro__))


class _Search:
    """Searches a pair of functions in all objects to which a function, class or instance refers.

    An object may be the stand-in for a package that is not installed, of which every attribute
    raises.  So the search runs no code of the user's: it reads the types of values, and containers
    with the methods of Python's own classes.

    `containers` have the original, and can take the replacement too; `has_original`: another object
    has the original.  `patched_containers` have the replacement; `has_patched`: any object has it.
    """

    def __init__(self, original: Callable, patched: Callable) -> None:
        self.has_original = self.has_patched = False
        self.containers: list[Container] = []
        self.patched_containers: list[Container] = []
        self._is_logging = False
        self._pair = (original, patched)
        self._seen: set[int] = set()

    def in_function(self, function: Any, depth: int) -> None:
        function = _unwrapped_function(function)
        if type(function) is not FunctionType or id(function) in self._seen:
            return
        self._seen.add(id(function))
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is still empty
                values.append(cell.cell_contents)
        names = set(_names(function.__code__))
        self.has_original = self.has_original or _names_builtin(names, self._pair[0])
        self._is_logging = self._is_logging or not names.isdisjoint(("add", "append"))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            values.append(value)
            if issubclass(type(value), ModuleType) and not _is_of_torch(
                str(vars(value).get("__name__"))
            ):
                values.extend(vars(value)[inner] for inner in names & vars(value).keys())
        self.in_values(values, depth)

    def in_values(self, values: Iterable, depth: int) -> None:
        for value in list(values):
            if type(value) in _METHODS:
                value = value.__func__
            if type(value) is FunctionType and value not in self._pair:
                if depth < _MAX_DEPTH and not _is_of_torch(value.__module__ or ""):
                    self.in_function(value, depth + 1)
            elif issubclass(type(value), list) and self._is_logging:
                continue  # a record of calls, not a container of functions
            elif self._record_functions_in(value) and issubclass(type(value), dict):
                values_inside = list(dict.values(value))
                for inner in values_inside if len(values_inside) <= _MAX_ITEMS else ():
                    self._record_functions_in(inner)

    def _record_functions_in(self, value: Any) -> bool:
        """Record which of the pair `value` is or contains.  Returns whether it is a container."""
        original, patched = self._pair
        cls = type(value)
        base_class = next((base for base in (dict, set, frozenset) if issubclass(cls, base)), None)
        if value is original:
            self.has_original = True
        elif base_class is not None:
            if base_class.__contains__(value, patched):
                self.has_patched = True
                if base_class is not frozenset:
                    self.patched_containers.append(value)
            elif base_class.__contains__(value, original):
                if self._may_extend(value):
                    self.containers.append(value)
                else:
                    self.has_original = True
            return True
        elif issubclass(cls, (list, tuple)):
            items = list((list if issubclass(cls, list) else tuple).__iter__(value))
            if len(items) <= _MAX_ITEMS:
                self.has_original = self.has_original or any(item is original for item in items)
                self.has_patched = self.has_patched or any(item is patched for item in items)
                return True
        return False

    def _may_extend(self, container: Any) -> TypeGuard[Container]:
        """Whether a container leads to handlers; one that counts or logs calls must not change."""
        if type(container) is set:
            return not self._is_logging
        return issubclass(type(container), dict) and callable(dict.get(container, self._pair[0]))


def _unwrapped_function(function: Any) -> Any:
    """Return the function inside its decorators, which `__wrapped__` leads to."""
    for _ in range(_MAX_ITEMS):
        if type(function) is not FunctionType or "__wrapped__" not in vars(function):
            break
        function = vars(function)["__wrapped__"]
    return function


def _names_builtin(names: set[str], original: Callable) -> bool:
    """Whether code names the original as a builtin of `torch._C._nn`, from which F has some."""
    name = getattr(original, "__name__", "")
    return C_NN_NAME in names and name in names and getattr(C_NN, name, None) is original


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"
