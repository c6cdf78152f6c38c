"""Replaced methods of one optimizer: put in, taken out, and put in again without piling up."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[Callable, tuple, dict], Any]
_SEAT = "_ampatch_seat"  # functools.wraps hands it on to wrappers around the replacement


class _Seat:
    """What answers for a method; without an answer calls pass through."""

    __slots__ = ("answer",)

    def __init__(self, answer: Answer) -> None:
        self.answer: Answer | None = answer


class Methods:
    """Shadows methods on the instance by bound methods.

    Only a bound method *of the optimizer* is met by LR schedulers built before
    and after: they rebind `step.__func__`.  A scheduler's wrapper stays when
    the method is taken out from under it; the next `put` takes the seat that is
    left inside, so that wrappers do not nest ever deeper.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._seats: list[_Seat] = []
        self._put: dict[str, tuple[bool, Any, Any]] = {}

    def put(self, name: str, answer: Answer) -> None:
        """Have `answer(original, args, kwargs)` called for the method `name`."""
        own = vars(self._optimizer)
        original = getattr(self._optimizer, name)
        seat = getattr(original, _SEAT, None)
        if seat is not None and seat.answer is None:
            seat.answer = answer
        else:
            seat = _Seat(answer)
            of_class = None if name in own else getattr(type(self._optimizer), name, None)
            asking = _asking(seat, name, original, of_class)
            method = types.MethodType(asking, self._optimizer)
            self._put[name] = (name in own, own.get(name), method)
            own[name] = method
        self._seats.append(seat)

    def put_own(self, name: str, method: Callable) -> None:
        """Have `method` on the optimizer under a name that at most its class has."""
        own = vars(self._optimizer)
        self._put[name] = (name in own, own.get(name), method)
        own[name] = method

    @contextlib.contextmanager
    def out(self) -> Iterator[None]:
        """Context manager: without these methods, except those that other code has wrapped."""
        own = vars(self._optimizer)
        inside = [name for name, (_, _, put) in self._put.items() if own.get(name) is put]
        for name in inside:
            self._take_out(name)
        try:
            yield
        finally:
            own.update({name: self._put[name][2] for name in inside})

    def take_out(self) -> None:
        """Give the optimizer its own methods back, except those that other code has wrapped."""
        for seat in self._seats:
            seat.answer = None
        for name, (_, _, put) in self._put.items():
            if vars(self._optimizer).get(name) is put:
                self._take_out(name)
        self._seats.clear()
        self._put.clear()

    def _take_out(self, name: str) -> None:
        had_own, found, _ = self._put[name]
        if had_own:
            vars(self._optimizer)[name] = found
        else:
            del vars(self._optimizer)[name]


def _asking(seat: _Seat, name: str, original: Callable, of_class: Any) -> Callable:
    """A method that asks what answers in `seat`; `original` is what it stands for.

    That was found on the class as `of_class`, if not None; what other code puts there
    later is called in its place, as Python would do.
    """

    @functools.wraps(getattr(original, "__func__", original))
    def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        call = original
        if of_class is not None:
            present = getattr(type(optimizer), name, of_class)
            if present is not of_class:
                call = _bound(present, optimizer)
        if seat.answer is None:
            return call(*args, **kwargs)
        return seat.answer(call, args, kwargs)

    setattr(method, _SEAT, seat)
    return method


def _bound(value: Any, optimizer: Any) -> Callable:
    """What a lookup on the instance makes of an attribute of its class (a mock is no function)."""
    bind = getattr(type(value), "__get__", None)
    return value if bind is None else bind(value, optimizer, type(optimizer))
