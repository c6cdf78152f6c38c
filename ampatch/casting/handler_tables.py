"""Tables of torch's functions that handlers of `__torch_function__` filled before the session.

`@implements(torch.nn.functional.linear)` at the top of a module fills a table with the
original.  While a replacement is in its place, the handler is called with the replacement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

from ..torch_private.torch_functions import NESTED_TENSORS, NN, NN_NAME

_METHODS = (MethodType, classmethod, staticmethod)
_DEEP = 4
_LARGE = 64


Table = dict | set


class HandlerTables:
    """Tables of functions in which handlers look up the function they are called with.

    A table that has an original gets the replacement beside it, with the same value, until
    `give_back`.  What the user's code entered under a replacement in between is then found
    under the original.
    """

    def __init__(self) -> None:
        self._met: dict[tuple[int, int], tuple[Table, Callable, Callable, bool]] = {}

    def still_asks_for(self, original: Callable, patched: Callable, holder: Any) -> bool:
        """Whether a handler can do nothing with the replacement, and needs the original.

        `holder` is the mode or the tensor whose handler it is.
        """
        if type(holder).__module__ == NESTED_TENSORS:
            return _names_below({NN_NAME, original.__name__}, original)
        found = _Search(original, patched)
        handler = holder.__torch_function__
        found.into_function(getattr(handler, "__func__", handler), 0)
        for cls in type(holder).__mro__:
            if cls not in _ROOTS:
                found.into_values(vars(cls).values(), 1)
        if isinstance(holder, TorchFunctionMode):
            found.into_values(vars(holder).values(), 1)
        for table in found.entered:
            self._met.setdefault((id(table), id(patched)), (table, original, patched, False))
        if found.patched:
            return False
        for table in found.tables:
            self._met[id(table), id(patched)] = (table, original, patched, True)
            if isinstance(table, dict):
                table[patched] = table[original]
            else:
                table.add(patched)
        return found.original

    def give_back(self) -> None:
        """Leave the tables without replacements."""
        for table, original, patched, is_ours in self._met.values():
            if patched not in table:
                continue
            if isinstance(table, dict):
                value = table.pop(patched)
                if not is_ours or value is not table.get(original, value):
                    table[original] = value
            else:
                table.remove(patched)
                table.add(original)
        self._met.clear()


_ROOTS = frozenset((*torch.nn.Parameter.__mro__, *TorchFunctionMode.__mro__))


class _Search:
    """Looks for two functions in what a function's code, a class or an instance refers to.

    That may be any object, such as the stand-in for a package that is not installed, of which
    every attribute raises.  So values are asked for their type alone, and containers by the methods
    of Python's own classes: no code of theirs runs.

    `tables` have the original, and can take the replacement beside it; `original`: something else
    has the original.  `entered` are tables that have the replacement; `patched`: something has it.
    """

    def __init__(self, original: Callable, patched: Callable) -> None:
        self.original = self.patched = False
        self.tables: list[Table] = []
        self.entered: list[Table] = []
        self._is_logging = False
        self._pair = (original, patched)
        self._seen: set[int] = set()

    def into_function(self, function: Any, depth: int) -> None:
        function = _unwrapped(function)
        if type(function) is not FunctionType or id(function) in self._seen:
            return
        self._seen.add(id(function))
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty as yet
                values.append(cell.cell_contents)
        names = set(_names(function.__code__))
        self.original = self.original or _names_below(names, self._pair[0])
        self._is_logging = self._is_logging or not names.isdisjoint(("add", "append"))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            values.append(value)
            if issubclass(type(value), ModuleType) and not _is_of_torch(
                str(vars(value).get("__name__"))
            ):
                values.extend(vars(value)[inner] for inner in names & vars(value).keys())
        self.into_values(values, depth)

    def into_values(self, values: Iterable, depth: int) -> None:
        for value in list(values):
            if type(value) in _METHODS:
                value = value.__func__
            if type(value) is FunctionType and value not in self._pair:
                if depth < _DEEP and not _is_of_torch(value.__module__ or ""):
                    self.into_function(value, depth + 1)
            elif issubclass(type(value), list) and self._is_logging:
                continue  # a record of calls, not a table of functions
            elif self._into(value) and issubclass(type(value), dict):
                inner = list(dict.values(value))
                for one in inner if len(inner) <= _LARGE else ():
                    self._into(one)

    def _into(self, value: Any) -> bool:
        """Note which of the two `value` is or has as a member.  Returns whether it has members."""
        original, patched = self._pair
        kind = type(value)
        table = next((one for one in (dict, set, frozenset) if issubclass(kind, one)), None)
        if value is original:
            self.original = True
        elif table is not None:
            if table.__contains__(value, patched):
                self.patched = True
                if table is not frozenset:
                    self.entered.append(value)
            elif table.__contains__(value, original):
                if self._can_take(value):
                    self.tables.append(value)
                else:
                    self.original = True
            return True
        elif issubclass(kind, (list, tuple)):
            items = list((list if issubclass(kind, list) else tuple).__iter__(value))
            if len(items) <= _LARGE:
                self.original = self.original or any(item is original for item in items)
                self.patched = self.patched or any(item is patched for item in items)
                return True
        return False

    def _can_take(self, table: Any) -> TypeGuard[Table]:
        """Whether a table leads to handlers: counts and records must not change."""
        if type(table) is set:
            return not self._is_logging
        return issubclass(type(table), dict) and callable(dict.get(table, self._pair[0]))


def _unwrapped(function: Any) -> Any:
    """The function inside of decorators that keep it as `__wrapped__`."""
    for _ in range(_LARGE):
        if type(function) is not FunctionType or "__wrapped__" not in vars(function):
            break
        function = vars(function)["__wrapped__"]
    return function


def _names_below(names: set[str], original: Callable) -> bool:
    """Whether a handler names the original by `torch._C._nn`, from which F has some functions."""
    name = getattr(original, "__name__", "")
    return NN_NAME in names and name in names and getattr(NN, name, None) is original


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"
