"""Put replacements in, take them out again.

A `PatchSet` replaces attributes of modules and classes and remembers what it
covered, so that `undo` leaves every owner as it was found.  It knows nothing
of tensors and dtypes: what to replace is decided in `install.py`, what a
replacement does in `wrapper.py`.

Three rules keep the restore exact:

* newest first, so a name replaced twice ends at its first original;
* an inherited name is deleted, not written back: of the 696 callables on
  `torch.Tensor` only 64 are its own, and a written-back copy would hide any
  later change to the base;
* what other code put over a replacement afterwards is left alone.  If that code puts the
  replacement back later, as a mock does when it ends, the replacement stays: without a policy it
  calls the original.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import wrapt

from ..log import logger

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""`(owner, name, make)`: what `PatchSet.replace` takes."""

_INHERITED = object()
_NONE: Any = object()


class _Covered(NamedTuple):
    owner: Any
    name: str
    found: Any
    put: Any


class PatchSet:
    """A stack of replaced attributes, and of other things to undo."""

    def __init__(self) -> None:
        self._covered: list[_Covered | Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._covered)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """Replace `owner.name` by `make(original)` and return the original.

        A special method that a class lacks is added, with a mark for the original.  Else
        `AttributeError` is raised when `owner` has no such name: whether that matters is for the
        caller to say.
        """
        found = vars(owner).get(name, _INHERITED)
        try:
            _, _, original = wrapt.resolve_path(owner, name)  # raw, not bound to the class
        except AttributeError:
            if not (inspect.isclass(owner) and name.startswith("__")):
                raise
            original = _NONE  # not None, which `rebind` would find in all modules
        replacement = make(original)
        # Noted before it is put in, and forgotten after it is back: Ctrl-C may strike anywhere.
        self._covered.append(_Covered(owner, name, found, replacement))
        setattr(owner, name, replacement)
        return original

    def rebind(self, namespace: dict, name: str, put: Any) -> None:
        """Replace the item `name` of a module's globals, without asking the module."""
        found = namespace[name]

        def restore() -> None:
            if namespace.get(name) is put:
                namespace[name] = found
            elif namespace.get(name) is not found:
                _tell_left_alone(namespace.get("__name__"), name)

        self.on_undo(restore)
        namespace[name] = put

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run `action` when its turn comes in `undo`."""
        self._covered.append(action)

    def undo(self) -> None:
        """Restore everything, newest first.  A second call finds nothing left to do."""
        while self._covered:
            entry = self._covered[-1]
            try:
                _restore(entry) if isinstance(entry, _Covered) else entry()
            except Exception:  # it is not tried again; what Ctrl-C has stopped is
                self._covered.pop()
                raise
            self._covered.pop()


def _restore(entry: _Covered) -> None:
    owner, name, found, put = entry
    now = vars(owner).get(name, _INHERITED)
    if now is found:
        return
    if now is not put:
        _tell_left_alone(getattr(owner, "__name__", owner), name)
    elif found is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, found)


def _tell_left_alone(owner: Any, name: str) -> None:
    logger.warning(
        "%s.%s was replaced by other code after ampatch patched it; left as it is.", owner, name
    )
