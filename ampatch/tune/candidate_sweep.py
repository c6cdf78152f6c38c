"""One sweep of O0, the level and the candidates, to which rows and seeds are added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampatch.config.opt_levels import properties_for
from ampatch.sweep import Sweep
from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.kinds import Kind
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.report.margin import Margin
from ampatch.sweep.report.results import Row
from ampatch.sweep.report.rows import has_accuracy, seeds_matter
from ampatch.sweep.trial import BASE, Case
from ampatch.tune.answer import ANSWER, OVERRIDES
from ampatch.tune.verdict import TuneError, passes, row_of


@dataclass(frozen=True)
class TuneTask:
    """A script to tune at an opt level; `options` has the options of `Sweep` that the user gave."""

    script: str
    arguments: Sequence[str]
    level: Case
    options: Mapping[str, Any]
    directory: Path
    progress: Callable[[], Progress | None]
    say: Callable[[str], None]

    @property
    def dtype(self) -> str:
        """The half dtype of the level."""
        return self.level.dtype or ""

    def sweep(
        self, rows: Sequence[Case], out: Path, options: Iterable[str], **further_options: Any
    ) -> Sweep:
        """A sweep with the user's values of `options`, and with `further_options`."""
        shared = {name: self.options[name] for name in options if name in self.options}
        return Sweep(self.script, self.arguments, rows=rows, out=out, **shared, **further_options)


class CandidateSweep:
    """The rows that have run.  Rows that `confirm` has seen pass have all seeds, others half.

    Raises what `Sweep` raises for wrong options or a directory of another sweep.
    """

    def __init__(self, task: TuneTask, seeds: int, resume: bool, overwrite: bool) -> None:
        self._task = task
        self.seeds, self.search_seeds = seeds, (seeds + 1) // 2
        self._margin = Margin.of(task.options.get("margin"))
        self._cases = [BASE, task.level]
        self.with_all_seeds: set[Case] = set()  # O0, and cases that passed with `search_seeds`
        self.runs: list[Run] = []
        self._sweep = self._extended_sweep(resume, overwrite)

    @property
    def kind(self) -> Kind:
        """The kind of the script, as its first run has shown."""
        return self._sweep.kind

    def run_case(self, case: Case) -> Row:
        """Run the remaining trials of a case.  Returns its row, compared with O0.

        Raises `SweepError`, and `TuneError` if O0 gives nothing to compare with.
        """
        progress = None if self.runs else self._task.progress()
        if case not in self._cases:
            self._cases.append(case)
        if self.runs:
            try:
                self._sweep = self._extended_sweep(resume=True)
            except ValueError as error:
                script = self._task.script
                raise TuneError(f"{script} changed while it was tuned: {error}") from error
        self.runs = self._sweep.run(progress).runs
        judge, better = self._task.options.get("judge"), self._task.options.get("better") or {}
        self._check_base(row_of(BASE, self.runs, judge, better))
        return row_of(case, self.runs, judge, better, self._margin)

    def confirm(self, case: Case, label: str) -> Row:
        """Run a case with `search_seeds`, and if it passes with all seeds.  Returns its row."""
        row = self.run_case(case)
        if not passes(row):
            return row
        remaining = self.seeds - self.search_seeds
        self._task.say(f"{label} passes with {self.search_seeds} seeds; now {remaining} more run")
        self.with_all_seeds |= {BASE, case}
        return self.run_case(case)

    def properties(self) -> dict[str, str]:
        """The settings that the level had in its runs, as text."""
        level = self._task.level
        for run in self.runs:
            if run.case == level and run.measured and run.measured.properties:
                return run.measured.properties
        properties = dataclasses.asdict(properties_for(level.opt_level, level.dtype))
        return {name: str(value) for name, value in properties.items()}

    def _extended_sweep(self, resume: bool, overwrite: bool = False) -> Sweep:
        unconfirmed = set(self._cases) - self.with_all_seeds
        return self._task.sweep(
            self._cases,
            self._task.directory,
            self._task.options,
            fewer_seeds=dict.fromkeys(unconfirmed, self.search_seeds),
            files=(ANSWER, OVERRIDES),
            rounds=1,
            fail_fast=True,
            resume=resume,
            overwrite=overwrite,
        )

    def _check_base(self, base: Row) -> None:
        if base.outcome == "failed":
            raise TuneError(
                f"O0 has failed: {base.status}. There is nothing to compare a candidate with."
            )
        if not has_accuracy(self.runs):
            raise TuneError(
                f"{self._task.script}: no loss and no metric was recorded at O0, so candidates "
                "cannot be compared with it. Have a loss go through ampatch.scale_loss or "
                "backward(), or call ampatch.log_metrics(accuracy=...), or give --metric."
            )
        if not seeds_matter(self.runs):
            raise TuneError(
                "O0 is the same with each seed, so no difference can be tested. Have {seed} among "
                "the script's arguments, or give --override-seeds."
            )
