"""Observers of casts, such as `ampatch.report`.

While `observers` is not empty, every patched call runs through an `ObservedCall`, and the
weight cache reports the half copies that it makes.  The code that adds an observer also calls
`CastState.acquire_thread_policies`; without that call, patched calls do not read `observers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .arguments import tensors_in


class CastObserver(Protocol):
    """The methods that are called for each patched call, in the thread that makes the call."""

    def call_begins(self, function: Callable) -> None:
        """Called before `function`, the original, with arguments that have been cast."""

    def was_cast(self, function: Callable, before: Tensor, after: Tensor) -> None:
        """Called for each cast argument: `function` gets `after` instead of `before`.

        `after` is a new tensor, or a half copy that an earlier call has made.
        """

    def call_ends(self, function: Callable, result: Any) -> None:
        """Called after `function` has returned `result`, or with None if it raised."""

    def copies_made(self, half_copies: Sequence[Tensor]) -> None:
        """Called after the weight cache has cast weights, in one batch."""


observers: list[CastObserver] = []


class ObservedCall:
    """One call of a patched function, to be called instead of `function`."""

    def __init__(self, function: Callable, args: Any, kwargs: dict) -> None:
        self._function = function
        self._before = tensors_in((*args, *kwargs.values()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        present = list(observers)
        for observer in present:
            observer.call_begins(self._function)
        for old, new in zip(self._before, tensors_in((*args, *kwargs.values())), strict=False):
            if old is not new:
                for observer in present:
                    observer.was_cast(self._function, old, new)
        result = None
        try:
            result = self._function(*args, **kwargs)
            return result
        finally:
            for observer in present:
                observer.call_ends(self._function, result)


def report_copies(half_copies: Sequence[Tensor]) -> None:
    """Report half copies of weights, made in one batch, to all observers."""
    for observer in observers:
        observer.copies_made(half_copies)
