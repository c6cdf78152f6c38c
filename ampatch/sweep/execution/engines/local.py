"""The engine of one machine: one thread per running trial watches the trial's process."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from ampatch.sweep.execution.engines.protocol import Ended, Event, Failed, Progressed, Started
from ampatch.sweep.execution.placement import Placement
from ampatch.sweep.execution.runner import Runner, TrialControl
from ampatch.sweep.execution.warm_starts import WarmStarts
from ampatch.sweep.trial import Trial


class LocalEngine:
    """Runs one trial at a time at each of `placements`; trials that run alone, at `timed`.

    With `warm` trials are forked from a server, if possible.
    """

    def __init__(
        self, placements: Sequence[Placement], timed: Placement, warm: WarmStarts | None = None
    ) -> None:
        self._warm = warm
        self._free = deque(placements)
        self._timed_placement = timed
        self._running: dict[Trial, tuple[Placement, TrialControl, threading.Thread]] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, control, _ in self._running.values():
            control.cancelled.set()
        try:
            self._join_threads()
        except BaseException:  # a second Ctrl-C
            for _, control, _ in self._running.values():
                control.killed.set()
            self._join_threads()
            raise
        finally:
            if self._warm is not None:
                self._warm.close()

    def has_room(self) -> bool:
        return bool(self._free)

    def submit(self, runner: Runner, trial: Trial, alone: bool) -> None:
        placement = self._timed_placement if alone else self._free.popleft()
        control = TrialControl(lambda now: self._events.put(Progressed(trial, now)), self._warm)
        arguments = runner, trial, control, placement
        thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._running[trial] = placement, control, thread
        self._events.put(Started(trial))
        thread.start()

    def events(self, seconds: float) -> Iterable[Event]:
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return []
        if isinstance(event, Ended):
            self._remove(event.run.trial)
        elif isinstance(event, Failed):
            self._remove(event.trial)
        return [event]

    def _remove(self, trial: Trial) -> None:
        placement, _, thread = self._running.pop(trial)
        thread.join()
        if placement is not self._timed_placement:
            self._free.append(placement)

    def _run(
        self, runner: Runner, trial: Trial, control: TrialControl, placement: Placement
    ) -> None:
        try:
            self._events.put(Ended(runner.run(trial, control, placement)))
        except BaseException as error:  # raised in the sweep's thread
            self._events.put(Failed(trial, error))

    def _join_threads(self) -> None:
        for _, _, thread in self._running.values():
            while thread.is_alive():
                thread.join(1.0)
