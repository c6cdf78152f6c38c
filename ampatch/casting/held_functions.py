"""Functions of torch that modules of a managed model hold: `self.f = partial(torch.exp)`.

Modules stored these originals before the patches.  While patches are installed, the modules'
attributes are the replacements, in partials, lists, tuples and dicts too.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .places import Replacements

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that each module has: its dicts of parameters, submodules and hooks."""
_DICTS = (dict, OrderedDict, defaultdict)


class HeldFunctions:
    """The functions that the modules of one model hold.  Lists and dicts are changed in place."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # (rebuilt, original) of a partial or tuple, by the id of the rebuilt one.
        self._rebuilt: dict[int, tuple[Any, Any]] = {}
        self._seen: set[int] = set()  # ids of lists and dicts, in one `_rebind_all`
        self._replacements: Replacements | None = None  # set while the replacements are bound

    def bind_replacements(self, replacements: Replacements) -> None:
        """Bind the modules' functions to replacements.  A second call does nothing."""
        if self._replacements is None:
            self._replacements = replacements
            self._rebind_all(self._replacement_or_same)

    def bind_originals(self) -> None:
        """Restore the modules' functions.  To be called before `replacements.restore_bindings`."""
        if self._replacements is not None:
            self._rebind_all(self._original_or_same)
            self._rebuilt.clear()
            self._replacements = None

    def name_of(self, value: Any) -> str | None:
        """The name of the function that `value` is, or is a partial of, if it has a replacement."""
        while isinstance(value, (functools.partial, staticmethod)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        patched = None if self._replacements is None else self._replacements.replacement_of(value)
        return None if patched is None else f"{patched.__module__}.{patched.__qualname__}"

    def _rebind_all(self, convert: Callable[[Any], Any]) -> None:
        for module in self._model.modules():
            attributes = {} if isinstance(module, torch.jit.ScriptModule) else vars(module)
            for name in attributes.keys() - _MODULE_ATTRIBUTES:
                value = attributes[name]
                if (new := self._rebound(value, convert)) is not value:
                    attributes[name] = new
        self._seen.clear()

    def _rebound(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        cls = type(value)
        if cls is list or cls in _DICTS:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for key, item in list(enumerate(value) if cls is list else value.items()):
                    if (new := self._rebound(item, convert)) is not item:
                        value[key] = new
            return value
        if isinstance(value, tuple):
            items = [self._rebound(item, convert) for item in value]
            if all(new is item for new, item in zip(items, value)):
                return convert(value)
            rebuilt = cls(*items) if hasattr(value, "_fields") else cls(items)
        elif cls is functools.partial:
            if (function := convert(value.func)) is value.func:
                return convert(value)
            rebuilt = functools.partial(function, *value.args, **value.keywords)
        else:
            return convert(value)
        converted = convert(value)
        if converted is not value:
            return converted
        self._rebuilt[id(rebuilt)] = rebuilt, value
        return rebuilt

    def _replacement_or_same(self, value: Any) -> Any:
        assert self._replacements is not None
        patched = self._replacements.replacement_of(value)
        return value if patched is None else patched

    def _original_or_same(self, value: Any) -> Any:
        assert self._replacements is not None
        rebuilt, original = self._rebuilt.get(id(value), (None, None))
        is_rebuilt = rebuilt is value and rebuilt is not None
        return original if is_rebuilt else self._replacements.original_of(value)
