"""Functions that a user's module bound before the patches: where, and what to do.

`check` searches the module, calls `initialize`, and searches again.  A function that is
no longer found was rebound; one that is still found is out of reach.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ampatch
from ampatch.casting.tables import BANNED, BEYOND, BLACKLIST, PROMOTE, WHITELIST
from ampatch.session.facade import listed_function

_DEEPEST = 8  # attribute of an item of an attribute of ...

GLOBAL = "global"
ADVICE = {
    GLOBAL: "torch's own modules are left alone",
    "default argument": "write `=None`, and name the function by its module in the body",
    "closure": "name the function by its module inside the inner function",
    "class attribute": "write a method that calls the function by its module",
    "instance attribute": "keep its name, or a method or lambda that calls it by its module",
    "partial": "write a lambda or a function that calls it by its module",
    "container": "put a lambda or a function there that calls it by its module",
}
"""What to write so that a function is found, by the kind of place that holds it."""


class Place(NamedTuple):
    """`path` in a module holds torch's `function`, as a `kind` of place."""

    module: str
    path: str
    kind: str
    function: str


class Checked(NamedTuple):
    """What `check` found, in the order of the modules' names and of their globals."""

    rebound: list[Place]
    out_of_reach: list[Place]


def check(name: str) -> Checked:
    """Import the module or file `name`, and find the patched functions of torch that it holds.

    The submodules that a package imports are searched too.  Raises `ImportError` if there
    is no such module, and for any exception that its import raises.
    """
    modules = _import(name)
    ampatch.deactivate()  # a script may have called initialize
    functions = listed_functions()
    before = [place for module in modules for place in places(module, functions)]
    ampatch.initialize([], opt_level="O1", patch_scope="process", verbosity=0)
    try:
        after = {place for module in modules for place in places(module, functions)}
    finally:
        ampatch.deactivate()
    return Checked(
        [place for place in before if place not in after],
        [place for place in before if place in after],
    )


def _import(name: str) -> list[types.ModuleType]:
    try:
        title = _import_file(Path(name)) if _is_file(name) else _import_module(name)
    except (Exception, SystemExit) as error:
        raise ImportError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    inside = [key for key in sys.modules if key == title or key.startswith(f"{title}.")]
    return [sys.modules[key] for key in sorted(inside)]


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _import_file(path: Path) -> str:
    sys.path.insert(0, str(path.resolve().parent))
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return path.stem


def _import_module(name: str) -> str:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name).__name__


def listed_functions() -> dict[int, str]:
    """Ids and names of the functions to patch; call it before the patches are installed."""
    found: dict[int, str] = {}
    for row in (*WHITELIST, *BLACKLIST, *PROMOTE, *BANNED, *BEYOND):
        for name in row.names:
            function = None if row.native else listed_function(row.where, name)
            if function is not None:
                found.setdefault(id(function), f"{row.where}.{name}")
    return found


def places(module: types.ModuleType, functions: dict[int, str]) -> Iterator[Place]:
    """The places where a module holds one of `functions`.

    The search follows containers, partials, the module's own functions and classes,
    and the attributes of instances, torch.nn modules among them.
    """
    seen: set[int] = set()

    def look(value: Any, path: str, kind: str, depth: int = 0) -> Iterator[Place]:
        if id(value) in functions:
            yield Place(module.__name__, path, kind, functions[id(value)])
        elif id(value) not in seen and depth < _DEEPEST:
            seen.add(id(value))
            for part, name, part_kind in _parts(value, module.__name__):
                yield from look(part, path + name, part_kind, depth + 1)

    for name, value in list(vars(module).items()):
        if not name.startswith("__"):
            yield from look(value, name, GLOBAL)


def _parts(value: Any, module: str) -> Iterator[tuple[Any, str, str]]:
    """What a value holds, with the end of its path and the kind of place; runs none of its code."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield value.__func__, "", "class attribute"
    elif type(value) is property:
        yield value.fget, "", "class attribute"
    elif isinstance(value, functools.partial):
        yield value.func, ".func", "partial"
        yield from _items(value.args, "partial")
        yield from _items(value.keywords, "partial")
    elif isinstance(value, types.FunctionType):
        if value.__module__ == module:
            yield from _parts_of_function(value)
    elif isinstance(value, type):
        if value.__module__ == module:
            for name, attribute in list(vars(value).items()):
                yield attribute, f".{name}", "class attribute"
    elif isinstance(value, (list, tuple, set, frozenset, dict)):
        yield from _items(value, "container")
    elif not isinstance(value, (types.ModuleType, torch.Tensor)):
        with contextlib.suppress(AttributeError):  # it has no __dict__
            for name, attribute in list(object.__getattribute__(value, "__dict__").items()):
                yield attribute, f".{name}", "instance attribute"


def _items(container: Any, kind: str) -> Iterator[tuple[Any, str, str]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    for key, item in list(pairs):
        yield item, f"[{key!r}]", kind


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[Any, str, str]]:
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        yield parameter.default, f"({name}=)", "default argument"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # the variable has no value yet
            yield cell.cell_contents, f" -> {name}", "closure"
    for name, value in vars(function).items():
        yield value, f".{name}", "instance attribute"
