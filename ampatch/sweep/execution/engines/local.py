"""The engine of one machine: a thread for each running trial watches its process."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from ampatch.sweep.execution.engines.protocol import Ended, Event, Failed, Reached, Started
from ampatch.sweep.execution.runner import Runner, Watch
from ampatch.sweep.execution.slot import Slot
from ampatch.sweep.execution.warm import Warm
from ampatch.sweep.trial import Trial


class LocalEngine:
    """Runs as many trials at a time as there are `slots`, and those that are timed at `timed`.

    With `warm` they are forked; they run one at a time.
    """

    def __init__(self, slots: Sequence[Slot], timed: Slot, warm: Warm | None = None) -> None:
        self._warm = warm
        self._free = deque(slots)
        self._timed = timed
        self._running: dict[Trial, tuple[Slot, Watch, threading.Thread]] = {}
        self._news: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, watch, _ in self._running.values():
            watch.cancelled.set()
        try:
            self._join()
        except BaseException:  # a second Ctrl-C
            for _, watch, _ in self._running.values():
                watch.killed.set()
            self._join()
            raise
        finally:
            if self._warm is not None:
                self._warm.close()

    def has_room(self) -> bool:
        return bool(self._free)

    def submit(self, runner: Runner, trial: Trial, alone: bool) -> None:
        slot = self._timed if alone else self._free.popleft()
        watch = Watch(lambda reach: self._news.put(Reached(trial, reach)), self._warm)
        thread = threading.Thread(target=self._work, args=(runner, trial, watch, slot), daemon=True)
        self._running[trial] = slot, watch, thread
        self._news.put(Started(trial))
        thread.start()

    def events(self, seconds: float) -> Iterable[Event]:
        try:
            event = self._news.get(timeout=seconds)
        except queue.Empty:
            return []
        if isinstance(event, Ended):
            self._ended(event.run.trial)
        elif isinstance(event, Failed):
            self._ended(event.trial)
        return [event]

    def _ended(self, trial: Trial) -> None:
        slot, _, thread = self._running.pop(trial)
        thread.join()
        if slot is not self._timed:
            self._free.append(slot)

    def _work(self, runner: Runner, trial: Trial, watch: Watch, slot: Slot) -> None:
        try:
            self._news.put(Ended(runner.run(trial, watch, slot)))
        except BaseException as error:  # raised in the sweep's thread
            self._news.put(Failed(trial, error))

    def _join(self) -> None:
        for _, _, thread in self._running.values():
            while thread.is_alive():
                thread.join(1.0)
