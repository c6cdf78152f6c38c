"""Calls that handlers see.  A handler is the `__torch_function__` of a class or a mode.

A handler compares the function that it is called with to torch's functions, and looks it up in
dicts and sets.  While `torch.nn.functional.linear` is a replacement, the handler gets the
replacement, with the caller's own arguments, before any cast.  The replacement casts when the
handler calls it.  A handler with a dict or set that was filled with the original before the session
gets the original.  Then a TorchFunctionMode redirects the handler's call of the original to the
replacement.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.overrides
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode, has_torch_function

from ..torch_private.torch_functions import (
    CACHED_OVERRIDE_FUNCTIONS,
    STACK_CHANGES,
    is_torch_function_mode_enabled,
    original_of_matmul,
    overloaded_args,
    pop_torch_function_mode,
    push_torch_function_mode,
    torch_function_stack_len,
)
from .arguments import leaves
from .calls import CastState
from .patches import PatchSet

_MATMUL_OPERATOR = torch.Tensor.__matmul__


class HasHandler(Exception):
    """Raised by casts if an argument's class handles the call.  Patched calls catch it."""


def has_handler(value: Any) -> bool:
    """Whether the class of `value` handles torch's calls now."""
    return not is_dynamo_compiling() and has_torch_function((value,))


def any_has_handler(args: tuple, kwargs: dict) -> bool:
    """Whether the class of one of these arguments, in lists too, handles torch's calls now."""
    return not is_dynamo_compiling() and has_torch_function(
        tuple(leaves((*args, *kwargs.values())))
    )


def call_handlers(
    state: CastState, patched: Callable, original: Callable, args: Any, kwargs: dict
) -> Any:
    """Like `torch.overrides.handle_torch_function`, but call each handler with what it knows.

    A handler that knows only the original gets the original, any other the replacement.
    """
    if original is _MATMUL_OPERATOR:  # torch calls handlers with the method
        patched, original = torch.Tensor.matmul, original_of_matmul()
    overloaded = overloaded_args(tuple(leaves((*args, *kwargs.values()))))
    types = tuple(map(type, overloaded))

    def call_handler(handler: Any) -> Any:
        needs_original = state.handler_containers.add_replacement(original, patched, handler)
        if not needs_original:
            return handler.__torch_function__(patched, types, tuple(args), kwargs)
        with _inside_mode(_Redirect(original, patched)):
            return handler.__torch_function__(original, types, tuple(args), kwargs)

    if is_torch_function_mode_enabled():
        with _without_innermost_mode() as mode:
            result = call_handler(mode)
        if result is not NotImplemented:
            return result
    for value in overloaded:
        result = call_handler(value)
        if result is not NotImplemented:
            return result
    raise TypeError(
        f"no implementation found for {getattr(patched, '__module__', 'torch')}."
        f"{getattr(patched, '__name__', patched)} on types that implement __torch_function__: "
        f"{[type(value) for value in overloaded]}"
    )


@contextlib.contextmanager
def _without_innermost_mode() -> Iterator[TorchFunctionMode]:
    mode = pop_torch_function_mode()
    try:
        yield mode
    finally:
        push_torch_function_mode(mode)


@contextlib.contextmanager
def _inside_mode(mode: TorchFunctionMode) -> Iterator[None]:
    push_torch_function_mode(mode)
    try:
        yield
    finally:
        pop_torch_function_mode()


@contextlib.contextmanager
def without_torch_function_modes() -> Iterator[None]:
    """Context manager: no TorchFunctionMode sees the calls in it.

    For calls of torch that ampatch's hooks make, and not the user.
    """
    modes = [pop_torch_function_mode() for _ in range(torch_function_stack_len())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            push_torch_function_mode(mode)


def without_torch_function_modes_if_any(state: CastState) -> AbstractContextManager[None]:
    """`without_torch_function_modes()`, if any thread is in a mode."""
    return (
        without_torch_function_modes()
        if state.threads_in_function_modes and not is_dynamo_compiling()
        else _NULL_CONTEXT
    )


_NULL_CONTEXT = contextlib.nullcontext()


def refill_override_caches(patches: PatchSet) -> None:
    """Replace torch's caches of overridable functions with empty ones until `patches.undo`.

    torch fills each cache once.  A cache from before the patches lacks the replacements.  A cache
    that torch fills while the patches are installed would keep the replacements forever.
    """
    for name in CACHED_OVERRIDE_FUNCTIONS:
        patches.replace(torch.overrides, name, lambda cached: functools.cache(cached.__wrapped__))


class _Redirect(TorchFunctionMode):
    """Redirects calls of one original to its replacement; all other calls are unchanged."""

    def __init__(self, original: Callable, patched: Callable) -> None:
        super().__init__()
        self._pair = (original, patched)

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # torch calls the handler with the class's attribute: for a method the replacement.
        if function in self._pair:
            function = self._pair[1]
        return function(*args, **(kwargs or {}))


class FunctionModes:
    """Records which threads are in a TorchFunctionMode: their calls take the slow path.

    Reads torch's stack of modes after each change of the stack.  So modes may enter and exit in any
    order, also before the patches are installed and after they are undone.
    """

    def __init__(self, state: CastState) -> None:
        self._state = state
        self._threads: set[int] = set()
        self._lock = threading.Lock()

    def watch(self, patches: PatchSet) -> None:
        """Follow the changes of torch's stack of modes until `patches.undo`."""
        patches.on_undo(self._forget_threads)
        for owner, name in STACK_CHANGES:
            patches.replace(owner, name, self._record_after)
        self.record_thread()

    def record_thread(self) -> None:
        """Record whether this thread is in a mode."""
        thread = threading.get_ident()
        is_in = torch_function_stack_len() > 0
        with self._lock:
            if is_in is (thread in self._threads):
                return
            (self._threads.add if is_in else self._threads.discard)(thread)
            self._update()

    def _forget_threads(self) -> None:
        with self._lock:
            self._threads.clear()
            self._update()

    def _update(self) -> None:
        self._state.threads_in_function_modes = len(self._threads)
        (
            self._state.acquire_thread_policies
            if self._threads
            else self._state.release_thread_policies
        )(self)

    def _record_after(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def push_or_pop(*mode: TorchFunctionMode) -> Any:
            result = original(*mode)
            if not is_dynamo_compiling():
                self.record_thread()
            return result

        return push_or_pop
