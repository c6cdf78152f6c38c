"""Places of functions, their replacements, and the globals of other modules that name them.

A place is a module or class, and a name in it.  An original has one replacement, under all names
that torch has for it: pickle, torch.jit and Dynamo find functions by name and by identity, and so
find the replacements.

While the patches are installed, a global that a user's module bound before
(`from torch.nn.functional import linear`) is bound to the replacement.  When the patches are
undone, it is bound to the original again, as is a global that was bound while they were installed.
Only globals of modules are searched, and only in the modules' `__dict__`, because some modules
import others if an attribute is read.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import wrapt

from ..torch_private.torch_functions import builtin_table
from .patches import MakeReplacement, PatchSet
from .tables import BUILTINS

NAMESPACES = (
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "torch.sparse",
    "torch.Tensor",
)
"""The namespaces of the functions of torch that overrides and registrations may name."""


def resolve(where: str) -> Any:
    """The module or class that a dotted place names: `torch.nn.functional`, `torch.Tensor`."""
    owner: Any = sys.modules[where.partition(".")[0]]
    for name in where.split(".")[1:]:
        owner = getattr(owner, name)
    return owner


def exists(where: str, name: str = "__name__") -> bool:
    """Whether this torch has the place `where`, and `name` in it."""
    try:
        return hasattr(resolve(where), name)
    except AttributeError:
        return False


def raw_attribute(owner: Any, name: str) -> Any:
    """`owner.name` as it is stored: a static method as such, not the function inside."""
    return wrapt.resolve_path(owner, name)[2]


def places_of(functions: Iterable[Any]) -> list[tuple[Any, str]]:
    """`(owner, name)` of each place in torch's namespaces that has one of these functions."""
    wanted = set(map(id, functions))
    return [
        (owner, name)
        for owner in map(resolve, filter(exists, NAMESPACES))
        for name in dir(owner)
        if id(getattr(owner, name, None)) in wanted
    ]


def public_name(where: str) -> str:
    """The public name of a row's function; `where` is its dotted name."""
    functional = "torch.nn.functional"
    return where.replace(f"{BUILTINS[functional]}.", f"{functional}.")


def user_place(user_call: str, place: Any, name: str | None) -> tuple[Any, str]:
    """Return `(owner, name)` of a function of the user's, given as these two or as a dotted string.

    Raises `ValueError` for a module that is not imported.  Errors begin with `user_call`.
    """
    if isinstance(name, str) and place is not None:
        owner, attribute = place, name
    else:
        owner, _, attribute = str(place).rpartition(".")
        is_text = isinstance(place, str) and name is None
        if not is_text or not owner:
            raise (ValueError if is_text else TypeError)(
                f"{user_call}(module={place!r}, name={name!r}): expected a module or class and the "
                'name of a function in it, or one dotted string such as "package.module.function".'
            )
    if isinstance(owner, str):
        title, (parent, _, inner) = owner, owner.rpartition(".")
        owner = sys.modules.get(title) or getattr(sys.modules.get(parent), inner, None)
        if owner is None:
            raise ValueError(f"{user_call}: {title} is not imported. Import it before this call.")
    return owner, attribute


class Replacements:
    """The replacements and their originals, from the first `replace` to `restore_bindings`."""

    def __init__(self, patches: PatchSet) -> None:
        self._patches = patches
        # (replacement, original) by the id of the replacement.
        self.pairs: dict[int, tuple[Any, Any]] = {}
        self._by_original: dict[int, Any] = {}  # the replacement by the id of its original

    def original_of(self, function: Any) -> Any:
        """Return the original of `function` if it is a replacement, else `function` itself."""
        while id(function) in self.pairs:
            function = self.pairs[id(function)][1]
        return function

    def replacement_of(self, original: Any) -> Any:
        """The replacement of one of torch's functions, or None."""
        return self._by_original.get(id(original))

    def replace(self, owner: Any, name: str, make: MakeReplacement, shared: bool = False) -> None:
        """Replace `owner.name` with `make(original)`.

        `shared`: a function with a replacement under another name gets the same replacement.
        """

        def make_and_register(original: Any) -> Any:
            existing = self._by_original.get(id(original)) if shared else None
            if existing is not None:
                return existing
            replacement = make(original)
            _name_after_place(replacement, original, owner, name)
            self.pairs[id(replacement)] = (replacement, original)
            self._by_original.setdefault(id(original), replacement)
            self._register_for_script(replacement, original)
            return replacement

        self._patches.replace(owner, name, make_and_register)

    def _register_for_script(self, replacement: Any, original: Any) -> None:
        table = builtin_table()
        if id(original) in table:
            table[id(replacement)] = table[id(original)]
            self._patches.on_undo(lambda: table.pop(id(replacement), None))

    def rebind(self, *originals: Any) -> None:
        """Bind the globals that are these originals (default: all) to their replacements."""
        ids = map(id, originals) if originals else self._by_original
        rebind({key: (self._patches, self._by_original[key]) for key in ids})

    def restore_bindings(self) -> None:
        """Bind the user's globals to the originals again.  To be called after the patches' undo."""
        if self.pairs:
            bind_originals(
                (function, self.original_of(function)) for function, _ in self.pairs.values()
            )
        self.pairs.clear()
        self._by_original.clear()


def _name_after_place(replacement: Any, original: Any, owner: Any, name: str) -> None:
    """Name a replacement after its place, because pickle stores functions by this name."""
    if inspect.isfunction(original):  # not builtins: TorchScript reads the source of `__wrapped__`
        functools.update_wrapper(replacement, original)
        return
    is_class = inspect.isclass(owner)
    replacement.__name__ = name
    replacement.__qualname__ = f"{owner.__name__}.{name}" if is_class else name
    replacement.__module__ = owner.__module__ if is_class else owner.__name__
    replacement.__doc__ = getattr(original, "__doc__", None)


SKIPPED_PACKAGES = {"torch", "ampatch"}
"""Packages in whose modules no name is rebound."""


def bindings_of(functions: Iterable[int]) -> list[tuple[dict, str, Any]]:
    """`(globals, name, function)` of each global, outside torch, whose id is in `functions`."""
    wanted = frozenset(functions)
    bindings = []
    for namespace in _namespaces() if wanted else ():
        # True for few of thousands of modules.  All in C, so no other thread imports meanwhile.
        if not wanted.isdisjoint(map(id, namespace.values())):
            bindings += [
                (namespace, name, value)
                for name, value in list(namespace.items())
                if id(value) in wanted
            ]
    return bindings


def rebind(replacements: Mapping[int, tuple[PatchSet, Any]]) -> None:
    """Bind each global that is an original to its replacement, until `patches.undo`.

    `replacements` maps an original's id to the patches that undo the binding and the replacement,
    which may be an original itself.
    """
    for namespace, name, value in bindings_of(replacements):
        while id(value) in replacements:
            patches, value = replacements[id(value)]
            patches.rebind(namespace, name, value)


def bind_originals(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Bind each global that is still a replacement to its original.

    `pairs`: (replacement, original).  To be called after the patches are undone.  Containers,
    classes and functions that hold a replacement keep it.  Without a policy, it calls the original.
    """
    pairs = list(pairs)  # keeps the ids from being reused
    originals = {id(replacement): original for replacement, original in pairs}
    for namespace, name, value in bindings_of(originals):
        while id(value) in originals:
            value = namespace[name] = originals[id(value)]


_skipped_titles: set[str] = set()  # keys of `sys.modules` that are in SKIPPED_PACKAGES


def _namespaces() -> Iterator[dict]:
    for title in sorted(sys.modules.keys() - _skipped_titles):
        if title.partition(".")[0] in SKIPPED_PACKAGES:
            _skipped_titles.add(title)
            continue
        module = sys.modules.get(title)
        if _is_module(module):
            namespace = object.__getattribute__(module, "__dict__")
            name = namespace.get("__name__")  # the title may be an alias of a module of torch
            module_name = name if isinstance(name, str) else title
            if module_name.partition(".")[0] not in SKIPPED_PACKAGES:
                yield namespace
                if title == "__mp_main__":
                    yield from _globals_of_functions(namespace)


def _globals_of_functions(namespace: dict) -> list[dict]:
    """The globals of the functions of a spawned process's main script.

    `multiprocessing` runs the script in a module that it drops, and copies the module's globals.
    """
    namespaces = {
        id(value.__globals__): value.__globals__
        for value in list(namespace.values())
        if type(value) is types.FunctionType and value.__module__ == "__mp_main__"
    }
    return [other for other in namespaces.values() if other is not namespace]


def _is_module(value: Any) -> bool:
    """Whether `value` is a real module.  `isinstance` would make a proxy import its module."""
    return issubclass(type(value), types.ModuleType)
