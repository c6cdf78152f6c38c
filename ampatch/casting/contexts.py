"""Policy contexts: a `with` block or decorator that puts a thread under a policy.

A policy belongs to a thread, as torch's grad mode does: what other generators
or tasks run in the thread while one of them is suspended inside a `with` block
is under that block too.  A decorated generator or coroutine is under the policy
only while it runs itself.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Any

from ..types import Called
from .stack import BLOCK, USER, Block

if TYPE_CHECKING:
    from .cast_state import CastState
    from .policy import Policy


class PolicyContext:
    """`with` block or decorator under the policy that `choose()` gives at each entry; nests.

    Decorates functions, generator functions, `async` functions and `async` generators.
    """

    __slots__ = ("_block", "_by_user", "_choose", "_state")

    def __init__(
        self, state: CastState, choose: Callable[[], Policy | None], by_user: bool
    ) -> None:
        self._state = state
        self._choose = choose
        self._by_user = by_user
        self._block = Block(state, USER if by_user else BLOCK)

    def __enter__(self) -> None:
        policy, state = self._choose(), self._state
        says = self._by_user and state.casts_here()
        self._block.enter(policy, state.instead_of_torch() if says else ())

    def __exit__(self, *exception: object) -> None:
        self._block.leave()

    def __call__(self, function: Called) -> Called:
        decorated: Any = functools.wraps(function)(self._decorated(function))
        return decorated

    def _again(self) -> PolicyContext:
        return PolicyContext(self._state, self._choose, self._by_user)

    def _decorated(self, function: Callable) -> Callable:
        for matches, decorated in _STEPWISE:
            if matches(function):
                return decorated(self._again, function)

        def in_context(*args: Any, **kwargs: Any) -> Any:
            with self._again():
                return function(*args, **kwargs)

        return in_context


def _driven(again: Callable[[], PolicyContext], steps: Any) -> Generator:
    """`yield from steps`, each step under a block of its own."""
    advance, sent = steps.send, None
    while True:
        try:
            with again():
                value = advance(sent)
        except StopIteration as end:
            return end.value
        try:
            advance, sent = steps.send, (yield value)
        except GeneratorExit:
            with again():
                steps.close()
            raise
        except BaseException as error:
            advance, sent = steps.throw, error


_awaited = types.coroutine(_driven)


def _generator(again: Callable[[], PolicyContext], function: Callable) -> Callable:
    def generator(*args: Any, **kwargs: Any) -> Generator:
        return (yield from _driven(again, function(*args, **kwargs)))

    return generator


def _coroutine(again: Callable[[], PolicyContext], function: Callable) -> Callable:
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await _awaited(again, function(*args, **kwargs))

    return coroutine


def _async_generator(again: Callable[[], PolicyContext], function: Callable) -> Callable:
    async def generator(*args: Any, **kwargs: Any) -> AsyncGenerator:
        steps = function(*args, **kwargs)
        step = steps.asend(None)
        while True:
            try:
                value = await _awaited(again, step)
            except StopAsyncIteration:
                return
            try:
                step = steps.asend((yield value))
            except GeneratorExit:
                await _awaited(again, steps.aclose())
                raise
            except BaseException as error:
                step = steps.athrow(error)

    return generator


_STEPWISE = (
    (inspect.isgeneratorfunction, _generator),
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isasyncgenfunction, _async_generator),
)
