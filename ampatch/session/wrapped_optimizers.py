"""Finds managed optimizers inside the objects that frameworks hand out in their place.

accelerate's `AcceleratedOptimizer` and Lightning's `LightningOptimizer` stand for an optimizer:
they have it as `.optimizer`, and share its `param_groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .index import Index
    from .session import Session


def find(index: Index, given: Any) -> tuple[Session, Any] | None:
    """As `index.find`, for an optimizer or for what stands for one."""
    tried: set[int] = set()
    while (found := index.find(given)) is None:
        tried.add(id(given))
        inner = getattr(given, "optimizer", None)
        if inner is None or id(inner) in tried or not _share_groups(given, inner):
            return None  # a scheduler, say, which has an optimizer and is none
        given = inner
    return found


def managed(index: Index, given: Any) -> Any:
    """The managed optimizer, or None."""
    session_and_managed = find(index, given)
    return None if session_and_managed is None else session_and_managed[1]


def _share_groups(outer: Any, inner: Any) -> bool:
    groups = getattr(outer, "param_groups", None)
    return groups is not None and groups is getattr(inner, "param_groups", None)
