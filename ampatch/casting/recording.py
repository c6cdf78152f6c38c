"""Calls that Dynamo records into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def opaque_call(function: Callable) -> Callable:
    """`function` as an object that a graph of Dynamo's holds.

    A graph's code names torch's functions.  Run under another policy than the one it was
    recorded under, it would find a replacement under the name, and cast by the new policy.
    """

    def recorded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return recorded


_OPAQUE_CALL = opaque_call(len).__code__


def is_opaque_call(function: Any) -> bool:
    """Whether it comes from `opaque_call`."""
    return getattr(function, "__code__", None) is _OPAQUE_CALL
