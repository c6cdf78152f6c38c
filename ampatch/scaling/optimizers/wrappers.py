"""Replaced methods of one optimizer: put in, taken out, and put in again without piling up."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

Answer = Callable[[Callable, tuple, dict], Any]
_SEAT = "_ampatch_seat"  # functools.wraps hands it on to wrappers around the replacement


class _Seat:
    """What answers for a method; without an answer calls pass through."""

    __slots__ = ("answer", "optimizer")

    def __init__(self, optimizer: Any, answer: Answer) -> None:
        self.optimizer = optimizer
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
            seat = _Seat(self._optimizer, answer)
            of_class = None if name in own else getattr(type(self._optimizer), name, None)
            asking = _asking(seat, name, original, of_class)
            method = types.MethodType(asking, self._optimizer)
            self._put[name] = (name in own, own.get(name), method)
            own[name] = method
        self._seats.append(seat)

    def take_out(self) -> None:
        """Give the optimizer its own methods back, except those that other code has wrapped."""
        for seat in self._seats:
            seat.answer = None
        own = vars(self._optimizer)
        for name, (had_own, found, put) in self._put.items():
            if own.get(name) is not put:
                continue
            if had_own:
                own[name] = found
            else:
                del own[name]
        self._seats.clear()
        self._put.clear()


def _asking(seat: _Seat, name: str, original: Callable, of_class: Any) -> Callable:
    """A method that asks what answers in `seat`; `original` is what it stands for.

    That was found on the class as `of_class`, if not None; what other code puts there
    later is called in its place, as Python would do.  A copy of the optimizer asks nobody.
    """

    @functools.wraps(getattr(original, "__func__", original))
    def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not seat.optimizer:
            return _bound(getattr(type(optimizer), name), optimizer)(*args, **kwargs)
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
