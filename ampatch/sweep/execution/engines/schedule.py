"""The order in which the trials of a sweep start, whatever engine runs them.

* Trials that may run beside each other come first, in the order of the plan, as many at a
  time as the engine takes.
* Timed trials follow when these have ended, one at a time, each alone on its devices.
* Nothing starts beside the very first trial until it has taken a step: a script that
  cannot train ends the sweep before it has filled a cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ampatch.sweep.execution.engines.protocol import Ended, Engine, Event, Lost, Reached, Started
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.trial import Trial

POLL = 0.5  # seconds to wait for news


class Schedule:
    """Submits trials to an engine: `others` side by side, then `timed` alone, in their order.

    `runner_for` is asked when a trial is about to start; None means that it is left out.
    `proven`: an earlier part of the sweep has shown that the script trains.
    """

    def __init__(
        self,
        others: Sequence[Trial],
        timed: Sequence[Trial],
        runner_for: Callable[[Trial], Runner | None],
        proven: bool,
    ) -> None:
        self.plan(others, timed)
        self._runner_for = runner_for
        self._running: set[Trial] = set()
        self._proven = proven

    def plan(self, others: Sequence[Trial], timed: Sequence[Trial]) -> None:
        """What is left to start, from now on."""
        self._others, self._timed = deque(others), deque(timed)

    def run(self, engine: Engine) -> Iterator[Event]:
        """What happens, until all trials have ended."""
        while self._others or self._timed or self._running:
            while self._others and engine.has_room() and (self._proven or not self._running):
                self._start(engine, self._others.popleft(), alone=False)
            while self._timed and not (self._others or self._running):
                self._start(engine, self._timed.popleft(), alone=True)
            for event in engine.events(POLL) if self._running else ():
                self._note(event)
                yield event

    def _start(self, engine: Engine, trial: Trial, alone: bool) -> None:
        runner = self._runner_for(trial)
        if runner is not None:
            self._running.add(trial)
            engine.submit(runner, trial, alone)

    def _note(self, event: Event) -> None:
        if isinstance(event, Reached):
            self._proven = self._proven or event.reach.steps > 0
        elif not isinstance(event, Started):
            self._running.remove(event.run.trial if isinstance(event, Ended) else event.trial)
            self._proven = self._proven or not isinstance(event, Lost)
