"""Learning-rate schedulers that wait while optimizer steps are skipped.

The class's `step` is replaced, not the instance's: a scheduler's `state_dict`
holds whatever its instance does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..casting.patches import PatchSet


class HeldSchedulers:
    """The schedulers that are to wait.

    `managed_of(optimizer)` gives the managed optimizer, which counts its steps, or None.
    """

    def __init__(self, managed_of: Callable[[Any], Any]) -> None:
        self._managed_of = managed_of
        self._patches = PatchSet()
        self._patched: set[type] = set()
        self._seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def hold(self, scheduler: Any) -> None:
        """Have `scheduler.step()` do nothing if all steps since its last one were skipped."""
        owner = next(kind for kind in type(scheduler).__mro__ if "step" in vars(kind))
        if owner not in self._patched:
            self._patched.add(owner)
            self._patches.replace(owner, "step", self._waiting)
        self._look(scheduler)

    def release(self) -> None:
        """All schedulers step as they did."""
        self._patches.undo()
        self._patched.clear()
        self._seen.clear()

    def _waiting(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler in self._seen and self._look(scheduler):
                return None
            return original(scheduler, *args, **kwargs)

        return step

    def _look(self, scheduler: Any) -> bool:
        """Whether the optimizer has only skipped since the last look.  Waits for the device."""
        managed = self._managed_of(scheduler.optimizer)
        if managed is None:
            return False
        known = self._seen.get(scheduler)
        now = managed.counter.read()
        self._seen[scheduler] = (weakref.ref(managed), now)
        if known is None or known[0]() is not managed:
            return now.skipped > 0 and now.taken == 0
        return now.skipped > known[1].skipped and now.taken == known[1].taken
