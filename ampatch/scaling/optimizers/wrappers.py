"""Replaces and restores methods of an optimizer; repeated replacement does not nest wrappers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

Replacement = Callable[[Callable, tuple, dict], Any]
_HOLDER = "_ampatch_holder"  # functools.wraps copies this attribute to wrappers of the method


class _ReplacementHolder:
    """Holds the replacement of a method.  If `replacement` is None, the original is called."""

    __slots__ = ("optimizer", "replacement")

    def __init__(self, optimizer: Any, replacement: Replacement) -> None:
        self.optimizer = optimizer
        self.replacement: Replacement | None = replacement


class ReplacedMethods:
    """Shadows methods of an optimizer with bound methods in its `__dict__`.

    LR schedulers rebind `step.__func__`, so the shadow must be a bound method of the optimizer.  If
    a scheduler has wrapped the shadow, `restore` keeps the scheduler's wrapper, and the shadow
    inside it calls the original method.  The next `replace` reuses the holder of this shadow, so
    that wrappers do not nest deeper with each `replace`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._holders: list[_ReplacementHolder] = []
        # By name: whether the instance had this attribute, its value, and the shadow.
        self._shadows: dict[str, tuple[bool, Any, Any]] = {}

    def replace(self, name: str, replacement: Replacement) -> None:
        """Make calls of the method `name` call `replacement(original, args, kwargs)`."""
        attributes = vars(self._optimizer)
        original = getattr(self._optimizer, name)
        holder = getattr(original, _HOLDER, None)
        if holder is not None and holder.replacement is None:
            holder.replacement = replacement
        else:
            holder = _ReplacementHolder(self._optimizer, replacement)
            class_method = (
                None if name in attributes else getattr(type(self._optimizer), name, None)
            )
            function = _make_shadow(holder, name, original, class_method)
            method = types.MethodType(function, self._optimizer)
            self._shadows[name] = (name in attributes, attributes.get(name), method)
            attributes[name] = method
        self._holders.append(holder)

    def restore(self) -> None:
        """Restore the optimizer's own methods, except methods that other code has wrapped."""
        for holder in self._holders:
            holder.replacement = None
        attributes = vars(self._optimizer)
        for name, (had_attribute, previous, method) in self._shadows.items():
            if attributes.get(name) is not method:
                continue
            if had_attribute:
                attributes[name] = previous
            else:
                del attributes[name]
        self._holders.clear()
        self._shadows.clear()


def _make_shadow(
    holder: _ReplacementHolder, name: str, original: Callable, class_method: Any
) -> Callable:
    """Make a method that shadows `original` and calls the replacement in `holder`.

    `class_method` is the method of the class, or None.  If other code replaces the method of the
    class later, the shadow calls the new method, as the optimizer without a shadow would.  On a
    copy of the optimizer, the shadow calls the method of the copy's class.
    """

    @functools.wraps(getattr(original, "__func__", original))
    def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not holder.optimizer:
            return _bind_method(getattr(type(optimizer), name), optimizer)(*args, **kwargs)
        shadowed = original
        if class_method is not None:
            present = getattr(type(optimizer), name, class_method)
            if present is not class_method:
                shadowed = _bind_method(present, optimizer)
        if holder.replacement is None:
            return shadowed(*args, **kwargs)
        return holder.replacement(shadowed, args, kwargs)

    setattr(method, _HOLDER, holder)
    return method


def _bind_method(value: Any, optimizer: Any) -> Callable:
    """An attribute of the class, bound to `optimizer` as `getattr(optimizer, ...)` binds it."""
    bind = getattr(type(value), "__get__", None)
    return value if bind is None else bind(value, optimizer, type(optimizer))
