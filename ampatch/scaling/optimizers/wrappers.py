"""Replaced methods of one optimizer: put in, taken out, and put in again without nesting."""

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


class ReplacedMethods:
    """Shadows methods of an optimizer by bound methods in its `__dict__`.

    LR schedulers rebind `step.__func__`, so the shadow must be a bound method of the optimizer.  If
    a scheduler has wrapped it, `take_out` leaves it there as a method that only passes calls on.
    The next `put` uses its slot again, so that wrappers do not nest deeper each time.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._slots: list[_Slot] = []
        # By name: whether the instance had such an attribute, which, and the shadow.
        self._shadows: dict[str, tuple[bool, Any, Any]] = {}

    def put(self, name: str, replacement: Replacement) -> None:
        """Have `replacement(original, args, kwargs)` called for the method `name`."""
        attributes = vars(self._optimizer)
        original = getattr(self._optimizer, name)
        slot = getattr(original, _SLOT, None)
        if slot is not None and slot.replacement is None:
            slot.replacement = replacement
        else:
            slot = _Slot(self._optimizer, replacement)
            of_class = None if name in attributes else getattr(type(self._optimizer), name, None)
            function = _shadow(slot, name, original, of_class)
            method = types.MethodType(function, self._optimizer)
            self._shadows[name] = (name in attributes, attributes.get(name), method)
            attributes[name] = method
        self._slots.append(slot)

    def take_out(self) -> None:
        """Give the optimizer its own methods back, except those that other code has wrapped."""
        for slot in self._slots:
            slot.replacement = None
        attributes = vars(self._optimizer)
        for name, (had_attribute, previous, method) in self._shadows.items():
            if attributes.get(name) is not method:
                continue
            if had_attribute:
                attributes[name] = previous
            else:
                del attributes[name]
        self._slots.clear()
        self._shadows.clear()


def _shadow(slot: _Slot, name: str, original: Callable, of_class: Any) -> Callable:
    """A method that calls the replacement in `slot`; `original` is the method that it shadows.

    `of_class` is the method of the class, or None.  If other code replaces that one later, the new
    one is called, as without a shadow.  On a copy of the optimizer the original is called.
    """

    @functools.wraps(getattr(original, "__func__", original))
    def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not slot.optimizer:
            return _bound(getattr(type(optimizer), name), optimizer)(*args, **kwargs)
        shadowed = original
        if of_class is not None:
            present = getattr(type(optimizer), name, of_class)
            if present is not of_class:
                shadowed = _bound(present, optimizer)
        if slot.replacement is None:
            return shadowed(*args, **kwargs)
        return slot.replacement(shadowed, args, kwargs)

    setattr(method, _SLOT, slot)
    return method


def _bound(value: Any, optimizer: Any) -> Callable:
    """An attribute of the class, as a lookup on the instance returns it: a function is bound."""
    bind = getattr(type(value), "__get__", None)
    return value if bind is None else bind(value, optimizer, type(optimizer))
