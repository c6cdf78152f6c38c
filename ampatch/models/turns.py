"""Forwards of one model in several threads take turns: its tables are there for all of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ..errors import AmpatchError

PATIENCE = 300.0
"""Seconds that a forward waits for one in another thread, before it counts as one without end."""

_waiting: dict[threading.Thread, Turns] = {}
"""Threads that wait, and for whose turn to end."""


class Turns:
    """Whose turn it is.

    `running()` is the thread whose forward runs, or None.  `abandon()` ends the turn of one that is
    not alive.  `name` is the model's, for the error.
    """

    def __init__(
        self,
        name: str,
        running: Callable[[], threading.Thread | None],
        abandon: Callable[[], None],
    ) -> None:
        self._name = name
        self._running = running
        self._abandon = abandon
        self._lock = threading.Lock()
        self._reserved_by: threading.Thread | None = None
        self._nested = 0  # calls within what has reserved it

    def begin(self) -> None:
        """Wait for one's turn.  Raises `AmpatchError` if that cannot come."""
        if not self._lock.acquire(False):
            self._wait(threading.current_thread())

    def _wait(self, me: threading.Thread) -> None:
        if self._reserved_by is me:
            self._nested += 1
            return
        _waiting[me] = self
        try:
            begun = time.monotonic()
            while not self._lock.acquire(timeout=0.1):
                running = self._running()
                if running is None:
                    continue
                if not running.is_alive():
                    self._abandon()
                elif self._waits_for(me) or time.monotonic() - begun > PATIENCE:
                    raise AmpatchError(
                        f"{self._name}: a forward in thread {me.name!r} waits for "
                        f"one in thread {running.name!r}, which does not end: at O2 the "
                        "forwards of one model in several threads take turns. Call the model in "
                        "one thread, or a copy.deepcopy of it in each."
                    )
        finally:
            _waiting.pop(me, None)

    def end(self) -> None:
        """One's turn has ended."""
        if self._nested:
            self._nested -= 1
        else:
            self._lock.release()

    def _waits_for(self, thread: threading.Thread) -> bool:
        """Whether the thread whose turn it is waits, perhaps through others, for `thread`."""
        seen: set[int] = set()
        held: Turns | None = self
        while held is not None and id(held) not in seen:
            running = held._running()
            if running is None or running is thread:
                return running is thread
            seen.add(id(held))
            held = _waiting.get(running)
        return False

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Context manager: it is this thread's turn, whatever it calls."""
        me = threading.current_thread()
        if me in (self._reserved_by, self._running()):
            yield
            return
        self.begin()
        self._reserved_by = me
        try:
            yield
        finally:
            self._reserved_by = None
            self.end()
