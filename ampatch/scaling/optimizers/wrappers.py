"""Replaced methods of one optimizer: put in, taken out, and put in again without piling up."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

Replacement = Callable[[Callable, tuple, dict], Any]
_SLOT = "_ampatch_slot"  # functools.wraps hands it on to wrappers around the replacement


class _Slot:
    """The replacement of a method; None: calls pass through to the original."""

    __slots__ = ("optimizer", "replacement")

    def __init__(self, optimizer: Any, replacement: Replacement) -> None:
        self.optimizer = optimizer
        self.replacement: Replacement | None = replacement


class Methods:
    """Shadows methods on the instance by bound methods.

    LR schedulers, built before or after, rebind `step.__func__`: so the shadow is
    a bound method *of the optimizer*.  A scheduler's wrapper stays when the method
    inside it is taken out.  The next `put` uses the slot in there again, so that
    wrappers do not nest ever deeper.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._slots: list[_Slot] = []
        self._put: dict[str, tuple[bool, Any, Any]] = {}

    def put(self, name: str, replacement: Replacement) -> None:
        """Have `replacement(original, args, kwargs)` called for the method `name`."""
        own = vars(self._optimizer)
        original = getattr(self._optimizer, name)
        slot = getattr(original, _SLOT, None)
        if slot is not None and slot.replacement is None:
            slot.replacement = replacement
        else:
            slot = _Slot(self._optimizer, replacement)
            of_class = None if name in own else getattr(type(self._optimizer), name, None)
            calling = _calling(slot, name, original, of_class)
            method = types.MethodType(calling, self._optimizer)
            self._put[name] = (name in own, own.get(name), method)
            own[name] = method
        self._slots.append(slot)

    def take_out(self) -> None:
        """Give the optimizer its own methods back, except those that other code has wrapped."""
        for slot in self._slots:
            slot.replacement = None
        own = vars(self._optimizer)
        for name, (had_own, previous, method) in self._put.items():
            if own.get(name) is not method:
                continue
            if had_own:
                own[name] = previous
            else:
                del own[name]
        self._slots.clear()
        self._put.clear()


def _calling(slot: _Slot, name: str, original: Callable, of_class: Any) -> Callable:
    """A method that calls the replacement in `slot`; `original` is the method that it shadows.

    `of_class` is the method of the class, or None.  If other code replaces that one later, the new
    one is called, as Python would do.  On a copy of the optimizer the original is called.
    """

    @functools.wraps(getattr(original, "__func__", original))
    def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not slot.optimizer:
            return _bound(getattr(type(optimizer), name), optimizer)(*args, **kwargs)
        call = original
        if of_class is not None:
            present = getattr(type(optimizer), name, of_class)
            if present is not of_class:
                call = _bound(present, optimizer)
        if slot.replacement is None:
            return call(*args, **kwargs)
        return slot.replacement(call, args, kwargs)

    setattr(method, _SLOT, slot)
    return method


def _bound(value: Any, optimizer: Any) -> Callable:
    """What a lookup on the instance makes of an attribute of its class (a mock is no function)."""
    bind = getattr(type(value), "__get__", None)
    return value if bind is None else bind(value, optimizer, type(optimizer))
