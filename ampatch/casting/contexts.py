"""Policy contexts: a `with` block or decorator that puts a thread under a policy.

A policy belongs to a thread, as torch's grad mode does.  While a generator or a task
is suspended inside a `with` block, all else that runs in the thread is under that
block too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..types import Called
from .calls import USER, CastState
from .policy import Policy


class PolicyContext:
    """`with` block or decorator under the policy that `choose()` gives at each entry; nests.

    `call`: the user's call that has made it, as written.  The block holds inside managed models
    too, and torch's own autocast is off meanwhile.
    """

    __slots__ = ("_call", "_choose", "_state")

    def __init__(self, state: CastState, choose: Callable[[], Policy | None], call: str) -> None:
        self._state = state
        self._choose = choose
        self._call = call

    def __enter__(self) -> None:
        policy, state = self._choose(), self._state
        off = state.instead_of_torch() if state.casts_here() else ()
        try:
            state.enter(policy, USER, self, off)
        except BaseException:
            state.leave(self)
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._state.leave(self)
        except BaseException:  # Ctrl-C: nothing else ends the block
            self._state.leave(self)
            raise

    def __call__(self, function: Called) -> Called:
        if _runs_later(function):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"{self._call} cannot decorate {name}: a generator or coroutine function returns "
                f"before it runs. Write `with {self._call}:` inside the function, around the "
                "calls; no `yield` or `await` belongs inside the block."
            )

        @functools.wraps(function)
        def in_context(*args: Any, **kwargs: Any) -> Any:
            with PolicyContext(self._state, self._choose, self._call):
                return function(*args, **kwargs)

        decorated: Any = in_context
        return decorated


def _runs_later(function: Any) -> bool:
    return (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    )
