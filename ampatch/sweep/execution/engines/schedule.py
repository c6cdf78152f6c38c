"""The order in which the trials of a sweep start, whatever engine runs them.

* Where trials run beside each other, those that are not timed come first, in the order of
  the plan, as many at a time as the engine takes.
* Timed trials run one at a time, in the order of the plan, each alone on its devices.
* Nothing starts beside the very first trial until it has taken a step: a script that
  cannot train ends the sweep before it has filled a cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ampatch.sweep.execution.engines.protocol import (
    Ended,
    Engine,
    Event,
    Lost,
    Reached,
    Started,
)
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.trial import Trial

POLL = 0.5  # seconds to wait for news


class Schedule:
    """Submits trials to an engine: `timed` alone, `others` side by side, each in their order.

    `proven`: an earlier part of the sweep has shown that the script trains.  `runner_for`
    is asked when a trial is about to start.
    """

    def __init__(
        self,
        timed: Sequence[Trial],
        others: Sequence[Trial],
        runner_for: Callable[[Trial], Runner],
        proven: bool,
    ) -> None:
        self._timed, self._others = deque(timed), deque(others)
        self._runner_for = runner_for
        self._running: dict[Trial, bool] = {}  # whether it runs alone
        self._proven = proven

    def run(self, engine: Engine) -> Iterator[Event]:
        """What happens, until all trials have ended."""
        while self._timed or self._others or self._running:
            while self._may_start(engine, self._others, alone=False):
                self._start(engine, self._others.popleft(), alone=False)
            if self._may_start(engine, self._timed, alone=True):
                self._start(engine, self._timed.popleft(), alone=True)
            for event in engine.events(POLL):
                self._note(event)
                yield event
            if not self._timed and not any(self._running.values()):
                engine.end_timing()

    def _may_start(self, engine: Engine, waiting: deque[Trial], alone: bool) -> bool:
        if not waiting or (self._running and not self._proven):
            return False
        if alone and any(self._running.values()):
            return False
        return engine.has_room(alone)

    def _start(self, engine: Engine, trial: Trial, alone: bool) -> None:
        self._running[trial] = alone
        engine.submit(self._runner_for(trial), trial, alone)

    def _note(self, event: Event) -> None:
        if isinstance(event, Reached):
            self._proven = self._proven or event.steps > 0
        elif not isinstance(event, Started):
            del self._running[event.run.trial if isinstance(event, Ended) else event.trial]
            self._proven = self._proven or not isinstance(event, Lost)
