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


def by_itself(function: Callable) -> Callable:
    """`function` for a graph of Dynamo's to hold as an object.

    Torch's functions stand in a graph's code by name, so that the graph, run under
    another policy than the one it was recorded under, would find a replacement there.
    """

    def recorded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return recorded


_BY_ITSELF = by_itself(len).__code__


def is_by_itself(function: Any) -> bool:
    """Whether it comes from `by_itself`."""
    return getattr(function, "__code__", None) is _BY_ITSELF


def proxy_of(value: Any) -> Any:
    """`value` if it is a torch.fx proxy, else None."""
    return value if isinstance(value, torch.fx.Proxy) else None
