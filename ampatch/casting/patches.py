"""Replace attributes, and undo it exactly.

A `PatchSet` replaces attributes of modules and classes and records the previous values, so that
`undo` restores every owner.  It knows nothing of tensors and dtypes: `install.py` decides what to
replace, and `wrapper.py` defines what a replacement does.

Three rules keep `undo` exact:

* `undo` runs newest first, so a name replaced twice gets its first original.
* An inherited name is deleted, not set.  `torch.Tensor` inherits 632 of its 696 callables, and
  an attribute with the inherited value would hide later changes of the base class.
* An attribute that other code has replaced since then is left alone.  If that code restores the
  replacement later, as a mock does at its end, the replacement stays.  Without a policy, it calls
  the original.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import wrapt

from ..log import logger

MakeReplacement = Callable[[Any], Any]
"""`make(original)` returns the replacement of a function or another attribute."""
Patch = tuple[Any, str, MakeReplacement]
"""`(owner, name, make)`, the arguments of `PatchSet.replace`."""

_INHERITED = object()
_NO_ORIGINAL: Any = object()


class _PatchedAttribute(NamedTuple):
    owner: Any
    name: str
    previous: Any
    replacement: Any


class PatchSet:
    """A stack of replaced attributes and of other actions to undo."""

    def __init__(self) -> None:
        self._entries: list[_PatchedAttribute | Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def replace(self, owner: Any, name: str, make: MakeReplacement) -> Any:
        """Replace `owner.name` with `make(original)`, and return the original.

        A special method that a class lacks is added; its original is `_NO_ORIGINAL`.  Raises
        `AttributeError` for any other name that `owner` lacks.
        """
        previous = vars(owner).get(name, _INHERITED)
        try:
            _, _, original = wrapt.resolve_path(owner, name)  # raw, not bound to the class
        except AttributeError:
            if not (inspect.isclass(owner) and name.startswith("__")):
                raise
            original = _NO_ORIGINAL  # not None, which `rebind` would find in all modules
        replacement = make(original)
        # Recorded before the patch and dropped after `undo`: KeyboardInterrupt may be raised
        # anywhere.
        self._entries.append(_PatchedAttribute(owner, name, previous, replacement))
        setattr(owner, name, replacement)
        return original

    def rebind(self, namespace: dict, name: str, replacement: Any) -> None:
        """Replace the item `name` of a module's globals, without an attribute access."""
        previous = namespace[name]

        def restore() -> None:
            if namespace.get(name) is replacement:
                namespace[name] = previous
            elif namespace.get(name) is not previous:
                _warn_left_alone(namespace.get("__name__"), name)

        self.on_undo(restore)
        namespace[name] = replacement

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run `action` when its turn comes in `undo`."""
        self._entries.append(action)

    def undo(self) -> None:
        """Restore everything, newest first.  A second call does nothing."""
        while self._entries:
            entry = self._entries[-1]
            try:
                _restore(entry) if isinstance(entry, _PatchedAttribute) else entry()
            except Exception:  # not tried again, unlike after KeyboardInterrupt
                self._entries.pop()
                raise
            self._entries.pop()


def _restore(entry: _PatchedAttribute) -> None:
    owner, name, previous, replacement = entry
    current = vars(owner).get(name, _INHERITED)
    if current is previous:
        return
    if current is not replacement:
        _warn_left_alone(getattr(owner, "__name__", owner), name)
    elif previous is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, previous)


def _warn_left_alone(owner: Any, name: str) -> None:
    logger.warning(
        "%s.%s was replaced by other code after ampatch patched it; left as it is.", owner, name
    )
