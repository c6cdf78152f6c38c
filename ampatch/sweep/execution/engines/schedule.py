"""The order in which the trials of a sweep start, on any engine.

* Trials that run side by side come first, in the order of the plan, as many at a time as the
  engine has room for.
* Trials that run alone on their devices follow, one at a time.
* The very first trial has to take a step before another starts, so that a script that cannot train
  ends the sweep before it has filled a cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ampatch.sweep.execution.engines.protocol import Ended, Engine, Event, Lost, Progressed, Started
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.trial import Trial

POLL = 0.5  # seconds to wait for an event


class Schedule:
    """Submits trials to an engine: first those that run side by side, then those that run alone.

    `runner_for` is called when a trial is about to start; if it returns None, the trial does not
    run.  `has_trained` is whether a run of the resumed sweep has shown that the script trains.
    """

    def __init__(
        self, side_by_side: Sequence[Trial], alone: Sequence[Trial],
        runner_for: Callable[[Trial], Runner | None], has_trained: bool,
    ) -> None:  # fmt: skip
        self.set_queues(side_by_side, alone)
        self._runner_for = runner_for
        self._running: set[Trial] = set()
        self._has_trained = has_trained

    def set_queues(self, side_by_side: Sequence[Trial], alone: Sequence[Trial]) -> None:
        """Replace the trials that have not been submitted."""
        self._side_by_side, self._alone = deque(side_by_side), deque(alone)

    def run(self, engine: Engine) -> Iterator[Event]:
        """The events, until all trials have ended."""
        while self._side_by_side or self._alone or self._running:
            remaining = self._side_by_side
            while remaining and engine.has_room() and (self._has_trained or not self._running):
                self._start(engine, remaining.popleft(), alone=False)
            while self._alone and not (self._side_by_side or self._running):
                self._start(engine, self._alone.popleft(), alone=True)
            for event in engine.events(POLL) if self._running else ():
                self._update(event)
                yield event

    def _start(self, engine: Engine, trial: Trial, alone: bool) -> None:
        runner = self._runner_for(trial)
        if runner is not None:
            self._running.add(trial)
            engine.submit(runner, trial, alone)

    def _update(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self._has_trained = self._has_trained or event.progress.steps > 0
        elif not isinstance(event, Started):
            self._running.remove(event.run.trial if isinstance(event, Ended) else event.trial)
            self._has_trained = self._has_trained or not isinstance(event, Lost)
