"""The runs of a sweep that have ended, and the results that are written to its files."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from ampatch.launch.program import Program
from ampatch.sweep.execution import notes
from ampatch.sweep.execution.budget import is_due
from ampatch.sweep.execution.directory import Directory
from ampatch.sweep.execution.plan import Plan
from ampatch.sweep.measure import machine
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.report.margin import Margin
from ampatch.sweep.report.provenance import machine_state
from ampatch.sweep.report.recommendation import recommendation
from ampatch.sweep.report.result_files import write_files
from ampatch.sweep.report.results import Results
from ampatch.sweep.report.rows import summarize


class CollectedRuns:
    """The `runs` that have ended, in the order of the plan, and their results."""

    def __init__(
        self, program: Program, arguments: Sequence[str], options: SweepOptions,
        recorded: dict[str, Any], plan: Plan, directory: Directory,
    ) -> None:  # fmt: skip
        self.runs: list[Run] = []
        self._script, self._arguments = str(program), list(arguments)
        self._options, self._recorded, self._margin = options, recorded, Margin.of(options.margin)
        self._plan, self._directory = plan, directory
        self._stems = dict.fromkeys(directory.earlier.trials if directory.earlier else ())
        if directory.earlier is None:
            now = datetime.datetime.now(datetime.timezone.utc)
            self._started = now.isoformat(timespec="seconds")
            self._provenance = machine.provenance(program.file())
        else:
            self._started = directory.earlier.started
            self._provenance = machine.resumed_provenance(
                program.file(), directory.earlier.provenance
            )

    def add(self, run: Run) -> list[str]:
        """Add a run, update the plan and write the files; returns the notes that are new."""
        earlier_subjects = self._script_notes().keys()
        self.runs.append(run)
        self.runs.sort(key=lambda run: self._plan.order[run.trial])  # runs end in any order
        size_note = self._plan.size_note() if self._plan.replan(self.runs) else ""
        self.write()
        notes_now = self._script_notes()
        new = [note for subject, note in notes_now.items() if subject not in earlier_subjects]
        return [*new, size_note] if size_note else new

    @property
    def planned(self) -> int:
        """The number of runs that have ended or will run."""
        ended, fail_fast = {run.trial for run in self.runs}, self._options.fail_fast
        trials = self._plan.trials
        return sum(trial in ended or is_due(trial, self.runs, fail_fast) for trial in trials)

    def write(self) -> None:
        write_files(self._directory.path, self.results())

    def results(self) -> Results:
        runs, options, plan = self.runs, self._options, self._plan
        rows = summarize(runs, options.judge, options.better, self._margin)
        self._stems |= dict.fromkeys(trial.file_stem for trial in plan.possible)
        all_notes = [  # the most important notes come first
            *self._script_notes().values(),
            notes.tune_note(self._script, self._arguments, options, plan, rows),
            *notes.measurement_notes(options, plan, runs, rows, len(runs) == self.planned),
        ]
        return Results(
            script=self._script, arguments=self._arguments, started=self._started,
            planned=self.planned, settings=self._directory.settings, versions=machine.versions(),
            machine={
                **({"script": plan.kind.description()} if plan.kind else {}),
                **machine_state(runs),
            },
            rows=rows, done=len(runs),
            recommendation=notes.half_baseline_recommendation(self._script, plan.kind)
            or recommendation(rows, plan.kind, plan.resume_options()),
            notes=[note for note in all_notes if note],
            provenance={**self._provenance, **machine.devices(runs)}, plan=plan.resume_record(),
            options=self._recorded, trials=list(self._stems), files=[*options.files],
        )  # fmt: skip

    def _script_notes(self) -> dict[str, str]:
        sweep = self._script, self._arguments, self._options, self._plan, self.runs
        return notes.script_notes(*sweep, self._directory.runs)
