"""Handlers' own tables of torch's functions, filled before the session.

`@implements(torch.nn.functional.linear)` at the top of a module puts the original into a table.
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


Table = dict | set


class HandlerTables:
    """Tables in which handlers look up the function that they are called with.

    A table that has an original gets an entry for the replacement too, with the same value, until
    `give_back`.  Entries that the user's code has added for a replacement meanwhile then become
    entries of the original.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], tuple[Table, Callable, Callable, bool]] = {}

    def knows_only_original(self, original: Callable, patched: Callable, holder: Any) -> bool:
        """Whether a handler does not know the replacement, and has to get the original.

        `holder` is the mode or the tensor whose handler it is.
        """
        if type(holder).__module__ == NESTED_TENSORS:
            return _names_builtin({C_NN_NAME, original.__name__}, original)
        search = _Search(original, patched)
        handler = holder.__torch_function__
        search.in_function(getattr(handler, "__func__", handler), 0)
        for cls in type(holder).__mro__:
            if cls not in _ROOTS:
                search.in_values(vars(cls).values(), 1)
        if isinstance(holder, TorchFunctionMode):
            search.in_values(vars(holder).values(), 1)
        for table in search.patched_tables:
            self._entries.setdefault((id(table), id(patched)), (table, original, patched, False))
        if search.has_patched:
            return False
        for table in search.tables:
            self._entries[id(table), id(patched)] = (table, original, patched, True)
            if isinstance(table, dict):
                table[patched] = table[original]
            else:
                table.add(patched)
        return search.has_original

    def give_back(self) -> None:
        """Take the replacements out of the tables."""
        for table, original, patched, is_ours in self._entries.values():
            if patched not in table:
                continue
            if isinstance(table, dict):
                value = table.pop(patched)
                if not is_ours or value is not table.get(original, value):
                    table[original] = value
            else:
                table.remove(patched)
                table.add(original)
        self._entries.clear()


_ROOTS = frozenset((*torch.nn.Parameter.__mro__, *TorchFunctionMode.__mro__))


class _Search:
    """Looks for two functions in all that a function's code, a class or an instance refers to.

    That may be any object, such as the stand-in for a package that is not installed, of which
    every attribute raises.  So the search reads the types of values, and containers by the methods
    of Python's own classes: no code of the user's runs.

    `tables` have the original, and can take the replacement too; `has_original`: another object has
    the original.  `patched_tables` have the replacement; `has_patched`: any object has it.
    """

    def __init__(self, original: Callable, patched: Callable) -> None:
        self.has_original = self.has_patched = False
        self.tables: list[Table] = []
        self.patched_tables: list[Table] = []
        self._is_logging = False
        self._pair = (original, patched)
        self._seen: set[int] = set()

    def in_function(self, function: Any, depth: int) -> None:
        function = _unwrapped(function)
        if type(function) is not FunctionType or id(function) in self._seen:
            return
        self._seen.add(id(function))
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty as yet
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
                continue  # a record of calls, not a table of functions
            elif self._check(value) and issubclass(type(value), dict):
                values_inside = list(dict.values(value))
                for inner in values_inside if len(values_inside) <= _MAX_ITEMS else ():
                    self._check(inner)

    def _check(self, value: Any) -> bool:
        """Record which of the two `value` is or contains.  Returns whether it is a container."""
        original, patched = self._pair
        cls = type(value)
        table = next((base for base in (dict, set, frozenset) if issubclass(cls, base)), None)
        if value is original:
            self.has_original = True
        elif table is not None:
            if table.__contains__(value, patched):
                self.has_patched = True
                if table is not frozenset:
                    self.patched_tables.append(value)
            elif table.__contains__(value, original):
                if self._may_extend(value):
                    self.tables.append(value)
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

    def _may_extend(self, table: Any) -> TypeGuard[Table]:
        """Whether a table leads to handlers; tables that count or record calls must not change."""
        if type(table) is set:
            return not self._is_logging
        return issubclass(type(table), dict) and callable(dict.get(table, self._pair[0]))


def _unwrapped(function: Any) -> Any:
    """The function inside of decorators, by `__wrapped__`."""
    for _ in range(_MAX_ITEMS):
        if type(function) is not FunctionType or "__wrapped__" not in vars(function):
            break
        function = vars(function)["__wrapped__"]
    return function


def _names_builtin(names: set[str], original: Callable) -> bool:
    """Whether code names the original as a builtin of `torch._C._nn`: F has some from there."""
    name = getattr(original, "__name__", "")
    return C_NN_NAME in names and name in names and getattr(C_NN, name, None) is original


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"
