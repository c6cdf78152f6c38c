"""Functions of torch that modules of a managed model hold: `self.f = partial(torch.exp)`.

They were taken before the patches, so no name of torch leads to them.  While patches are in, the
modules' attributes have the replacements, in partials, lists, tuples and dicts too.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .places import Replacements

_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes that each module has: its tables of parameters, submodules and hooks."""
_DICTS = (dict, OrderedDict, defaultdict)


class HeldFunctions:
    """What the modules of one model hold.  Lists and dicts are changed in place."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made: dict[int, tuple[Any, Any]] = {}  # by id: a partial or tuple, what it replaced
        self._seen: set[int] = set()  # lists and dicts, in one exchange
        self._replacements: Replacements | None = None  # while they are in

    def put_in(self, replacements: Replacements) -> None:
        """Have the modules hold replacements; nothing where they do."""
        if self._replacements is None:
            self._replacements = replacements
            self._exchange_all(self._replaced)

    def take_out(self) -> None:
        """Give the modules back what they held; to be called while the replacements are known."""
        if self._replacements is not None:
            self._exchange_all(self._restored)
            self._made.clear()
            self._replacements = None

    def name_of(self, value: Any) -> str | None:
        """The name of the function that `value` is or a partial of, if it has a replacement."""
        while isinstance(value, (functools.partial, staticmethod)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        found = None if self._replacements is None else self._replacements.of(value)
        return None if found is None else f"{found.__module__}.{found.__qualname__}"

    def _exchange_all(self, convert: Callable[[Any], Any]) -> None:
        for module in self._model.modules():
            own = {} if isinstance(module, torch.jit.ScriptModule) else vars(module)
            for name in own.keys() - _TORCHS_OWN:
                value = own[name]
                if (new := self._exchanged(value, convert)) is not value:
                    own[name] = new
        self._seen.clear()

    def _exchanged(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        kind = type(value)
        if kind is list or kind in _DICTS:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for key, item in list(enumerate(value) if kind is list else value.items()):
                    if (new := self._exchanged(item, convert)) is not item:
                        value[key] = new
            return value
        if isinstance(value, tuple):
            items = [self._exchanged(item, convert) for item in value]
            if all(new is item for new, item in zip(items, value)):
                return convert(value)
            made = kind(*items) if hasattr(value, "_fields") else kind(items)
        elif kind is functools.partial:
            if (function := convert(value.func)) is value.func:
                return convert(value)
            made = functools.partial(function, *value.args, **value.keywords)
        else:
            return convert(value)
        found = convert(value)
        if found is value:
            self._made[id(made)] = made, value
        return made if found is value else found

    def _replaced(self, value: Any) -> Any:
        assert self._replacements is not None
        found = self._replacements.of(value)
        return value if found is None else found

    def _restored(self, value: Any) -> Any:
        assert self._replacements is not None
        made, found = self._made.get(id(value), (None, None))
        return found if made is value and made is not None else self._replacements.original(value)
