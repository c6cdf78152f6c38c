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
    """Whose turn it is: `holder`'s, or nobody's.

    `abandon()` ends the turn of a thread that is not alive.  `name` is the model's, for the error.
    """

    def __init__(self, name: str, abandon: Callable[[], None]) -> None:
        self._name = name
        self._abandon = abandon
        self._lock = threading.Lock()
        self.holder: threading.Thread | None = None
        self._nested = 0  # turns within the holder's own

    def begin(self, me: threading.Thread) -> None:
        """Wait for one's turn.  Raises `AmpatchError` if that cannot come."""
        if not self._lock.acquire(False):
            if self.holder is me:
                self._nested += 1
                return
            self._wait(me)
        self.holder = me

    def _wait(self, me: threading.Thread) -> None:
        _waiting[me] = self
        try:
            begun = time.monotonic()
            while not self._lock.acquire(timeout=0.1):
                holder = self.holder
                if holder is None:
                    continue
                if not holder.is_alive():
                    self._abandon()
                elif self._waits_for(me) or time.monotonic() - begun > PATIENCE:
                    raise AmpatchError(
                        f"{self._name}: a forward in thread {me.name!r} waits for "
                        f"one in thread {holder.name!r}, which does not end: at O2 the "
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
            self.holder = None
            self._lock.release()

    def _waits_for(self, thread: threading.Thread) -> bool:
        """Whether the thread whose turn it is waits, perhaps through others, for `thread`."""
        seen: set[int] = set()
        held: Turns | None = self
        while held is not None and id(held) not in seen:
            if held.holder is None or held.holder is thread:
                return held.holder is thread
            seen.add(id(held))
            held = _waiting.get(held.holder)
        return False

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Context manager: it is this thread's turn, whatever it calls."""
        me = threading.current_thread()
        self.begin(me)
        try:
            yield
        finally:
            self.end()
