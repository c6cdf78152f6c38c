"""Runs the trials of a sweep: handles each event of the engine, and updates the plan."""

from __future__ import annotations

import dataclasses
import time

from ampatch.errors import AmpatchError
from ampatch.launch.program import Program
from ampatch.sweep.cases_and_trials import SUBJECT
from ampatch.sweep.execution.budget import is_due
from ampatch.sweep.execution.collected_runs import CollectedRuns
from ampatch.sweep.execution.directory import Directory, RunFiles
from ampatch.sweep.execution.early_stops import failure_text, reason_to_stop
from ampatch.sweep.execution.engines.protocol import Ended, Engine, Event, Lost, Progressed, Started
from ampatch.sweep.execution.engines.schedule import Schedule
from ampatch.sweep.execution.notes import kind_note
from ampatch.sweep.execution.plan import Plan
from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.measure.output_metrics import read_metrics
from ampatch.sweep.measure.run_record import Measured, Run
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.report.margin import LAST_LOSS
from ampatch.sweep.report.run_figures import OK, status
from ampatch.sweep.trial import BASE, Case, Trial


class SweepError(AmpatchError):
    """A sweep cannot continue; its measurements are kept."""


class Coordinator:
    """Starts the remaining trials of a plan, and adds what they measured to `collected`."""

    def __init__(
        self, program: Program, options: SweepOptions, plan: Plan, collected: CollectedRuns,
        directory: Directory,
    ) -> None:  # fmt: skip
        self._program, self._options = program, options
        self._plan, self._collected, self._directory = plan, collected, directory
        self._begun: set[Trial] = set()
        self._lost: list[Lost] = []
        self._started_at = 0.0  # when `run` began, by `time.monotonic`
        self._has_warned_over_budget = False
        self.shown_failures: set[Case] = set()  # rows of which a failure was shown

    def add_earlier_runs(self) -> None:
        """Add the runs of the sweep that is resumed."""
        for run in self._directory.finished(self._plan.possible, self._options.timeout):
            # A run that stopped the sweep is repeated, because its cause may be fixed.
            if not self._reason_to_stop(run):
                log, patterns = self._files(run).log, self._options.metrics
                if run.measured and patterns and log.exists():
                    run.measured.metrics.update(read_metrics(log, patterns))
                self._check_metrics(run)
                self._collected.runs.append(run)
                self._begun.add(run.trial)
        self._plan.replan(self._collected.runs)

    def run(self, runner: Runner, engine: Engine, display: Progress) -> None:
        """Run the remaining trials.  Raises `SweepError` if the sweep should not go on."""
        self._started_at = time.monotonic()
        for note in filter(None, (self._plan.half_speed_note(), self._plan.size_note())):
            display.said(note)
        schedule = Schedule(
            *self._queues(),
            runner_for=lambda trial: self._runner_for(trial, runner),
            has_trained=bool(self._collected.runs),
        )
        for event in schedule.run(engine):
            if self._update_kind(event):
                schedule.set_queues(*self._queues())
                if self._plan.kind.lacks_initialize:
                    display.said(kind_note(str(self._program), self._options, self._plan))
            self._handle(event, display)
            if isinstance(event, Ended) and self._plan.has_budget:
                # Every submitted trial has begun, so the new queues lose none.
                schedule.set_queues(*self._queues())
        if self._lost:
            labels = ", ".join(f"{event.trial.label} ({event.reason})" for event in self._lost)
            problem = f"These trials were lost because their workers died: {labels}"
            raise SweepError(f"{problem}. --resume runs them again.")

    def _queues(self) -> tuple[list[Trial], list[Trial]]:
        base_has_run = any(run.case == BASE for run in self._collected.runs)
        return self._plan.queues(self._begun, base_has_run)

    def _runner_for(self, trial: Trial, runner: Runner) -> Runner | None:
        """The runner of a trial that is about to start; None if the trial is not due."""
        runs = self._collected.runs
        if not is_due(trial, runs, self._options.fail_fast):
            return None
        return dataclasses.replace(
            runner, kind=self._plan.kind, steps=self._plan.steps(trial, runs)
        )

    def _update_kind(self, event: Event) -> bool:
        """Set the kind that the event shows; returns whether it is new and so changed the plan."""
        if isinstance(event, Progressed):
            kind = event.progress.kind
        elif isinstance(event, Ended):
            kind = (event.run.measured or Measured()).kind
        else:
            return False
        try:
            is_new = self._plan.recognize(kind)
        except ValueError as error:
            raise SweepError(str(error).replace(SUBJECT, str(self._program), 1)) from None
        if is_new:
            self._directory.add_settings(self._plan.settings())
            self._collected.write()  # summary.json names each trial before it starts
        return is_new

    def _handle(self, event: Event, display: Progress) -> None:
        if isinstance(event, Started):
            self._begun.add(event.trial)
            count = 0 if self._plan.has_budget else self._collected.planned
            seconds = self._plan.seconds_left(self._begun - {event.trial})
            display.started(len(self._begun), count, event.trial, seconds)
        elif isinstance(event, Progressed):
            self._warn_if_over_budget(display)
            display.reached(event.trial, event.progress.steps, event.progress.loss)
        elif isinstance(event, Lost):
            self._lost.append(event)
            display.lost(event.trial, event.reason)
        elif isinstance(event, Ended):
            self._handle_ended(event.run, display)
        else:
            is_wrong_metric = isinstance(event.error, ValueError)  # --metric matched no number
            raise SweepError(str(event.error)) if is_wrong_metric else event.error

    def _warn_if_over_budget(self, display: Progress) -> None:
        """Warn once that the first run alone takes longer than the budget."""
        is_first = not (self._collected.runs or self._has_warned_over_budget)
        if is_first and self._plan.exceeds_budget(time.monotonic() - self._started_at):
            self._has_warned_over_budget = True
            display.said(
                "The first run of O0 alone takes longer than the budget of the whole sweep. "
                "--steps N ends each run after N steps."
            )

    def _handle_ended(self, run: Run, display: Progress) -> None:
        self._begun.add(run.trial)
        reason = self._reason_to_stop(run)
        new_notes = self._collected.add(run)
        display.ended(run)
        if status(run) != OK and run.case not in self.shown_failures:
            self.shown_failures.add(run.case)
            if not reason:
                new_notes.append(failure_text(run, self._files(run).log))
        is_last = len(self._collected.runs) == len(self._plan.trials)
        if reason and is_last:
            new_notes.append(reason)
        for note in new_notes:
            display.said(note)
        if reason and not is_last:
            raise SweepError(reason)
        self._check_metrics(run)

    def _check_metrics(self, run: Run) -> None:
        """Raise `SweepError` for a metric of the options that a good run lacks."""
        if run.trial.short or status(run) != OK:
            return
        reported = [*run.measured.metrics, *([LAST_LOSS] if run.measured.losses else [])]
        options = self._options
        for name, pattern in options.metrics.items():
            if name not in reported:
                raise SweepError(
                    f"--metric {name}={pattern}: nothing in the output of {run.trial.label} "
                    f"matches ({self._files(run).log})."
                )
        for name in filter(None, [options.judge, *options.better]):
            if name not in reported:
                raise SweepError(
                    f"--judge or --better: {self._program} reports no {name!r}. Expected one of: "
                    f"{', '.join(map(repr, reported)) or 'nothing; see ampatch.log_metrics'}."
                )

    def _reason_to_stop(self, run: Run) -> str:
        runs, log = self._collected.runs, self._files(run).log
        return reason_to_stop(str(self._program), runs, run, log)

    def _files(self, run: Run) -> RunFiles:
        return RunFiles.of(self._directory.runs, run.trial)
