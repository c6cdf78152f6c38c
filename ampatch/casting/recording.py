"""Calls that are recorded into a graph: by torch.fx, through a proxy, or by Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorded(Exception):
    """The call is being recorded by torch.fx; raised by the casts, caught by the patched call."""

    def __init__(self, proxy: Any) -> None:
        super().__init__()
        self._proxy = proxy

    def record(self, patched: Callable, args: Any, kwargs: dict) -> Any:
        """Record the patched function itself: with the original the graph would lose the cast."""
        return self._proxy.tracer.create_proxy("call_function", patched, tuple(args), kwargs)


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


def proxy_of(value: Any) -> Any:
    """`value` if it is a torch.fx proxy, else None."""
    return value if isinstance(value, torch.fx.Proxy) else None
