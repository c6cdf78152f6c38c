"""`Sweep`: a script with its options, its trials, and their results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ampatch._version import __version__
from ampatch.launch.program import Program
from ampatch.sweep.cases_and_trials import counts_its_steps
from ampatch.sweep.execution import engines
from ampatch.sweep.execution.collected_runs import CollectedRuns
from ampatch.sweep.execution.coordinator import Coordinator, SweepError
from ampatch.sweep.execution.directory import Directory, choose_directory, results_in
from ampatch.sweep.execution.engines.protocol import EngineError
from ampatch.sweep.execution.placement import device_groups
from ampatch.sweep.execution.plan import Plan
from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.kinds import Kind
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.options import SweepOptions, resumed_options
from ampatch.sweep.report.margin import Margin
from ampatch.sweep.report.results import Results, Row
from ampatch.sweep.trial import Case, Trial


class Sweep:
    """A script and its trials; `run` adds to `runs`.

    Args:
        script: the file of the script, or with `module` the name of a module.
        arguments: arguments of the script, in which `{seed}`, `{steps}` and `{trial_dir}` (an empty
            directory for each trial) are replaced.
        options: the fields of `SweepOptions`, by keyword.

    The first run at O0 finds out the kind of the script, which decides on the rows.  On a CUDA
    device a row `O0+tf32` is added.  With `rows`, a list of `Case`, only these cases run; a resumed
    sweep may have other cases.

    Raises `FileNotFoundError`, `ImportError`, `TypeError` or `ValueError` for a script or options
    that cannot run, `OSError` if the directory cannot be written.  Locks the directory until
    `close`, which `run` calls.
    """

    def __init__(self, script: str, arguments: Sequence[str] = (), **options: Any) -> None:
        sweep_options = SweepOptions(**options)
        self._program = Program(str(script), sweep_options.module)
        self._file = self._program.file()
        self.script = str(self._program)
        path = choose_directory(
            sweep_options.out, self._program.title, sweep_options.resume or sweep_options.overwrite
        )
        existing = results_in(path, sweep_options.files)
        earlier = existing if sweep_options.resume else None
        if sweep_options.resume and earlier is None:
            raise ValueError(f"{path}: there is no sweep to resume. Leave --resume out.")
        self.arguments = list(map(str, arguments))
        self._resume_note, recorded = "", sweep_options.to_record(options)
        if earlier is not None:
            self._resume_note, recorded, options = resumed_options(
                earlier, options, recorded, self.arguments
            )
            self.arguments = self.arguments or earlier.arguments
            sweep_options = SweepOptions(**options)
        self._options = sweep_options
        if counts_its_steps(self.arguments) and sweep_options.steps is None:
            raise ValueError("{steps} is among the script's arguments: give --steps N as well.")
        if sweep_options.devices:
            device_groups(sweep_options.devices, sweep_options.nproc_per_node or 1)
        Margin.of(sweep_options.margin)  # so that it raises before the folder is made
        self._plan = Plan(sweep_options, earlier)
        self._directory = Directory(path, self._settings(), sweep_options)
        directory, plan = self._directory, self._plan
        self._collected = CollectedRuns(
            self._program, self.arguments, sweep_options, recorded, plan, directory
        )
        self._coordinator = Coordinator(
            self._program, sweep_options, plan, self._collected, directory
        )
        try:
            self._coordinator.add_earlier_runs()
            self._collected.write()
            self._directory.runs.mkdir(exist_ok=True)
        except SweepError as error:
            self.close()
            raise ValueError(str(error)) from None

    @property
    def directory(self) -> Path:
        """The folder of the results."""
        return self._directory.path

    @property
    def kind(self) -> Kind:
        """The kind of the script, as far as its runs have shown it."""
        return self._plan.kind

    @property
    def cases(self) -> list[Case]:
        """The rows, as far as the kind of the script is known."""
        return self._plan.cases

    @property
    def trials(self) -> list[Trial]:
        """The trials, in order."""
        return self._plan.trials

    @property
    def runs(self) -> list[Run]:
        """The runs that have ended."""
        return self._collected.runs

    @property
    def shown_failures(self) -> set[Case]:
        """The rows of which a failure was shown, with the last lines of its output."""
        return self._coordinator.shown_failures

    @property
    def results(self) -> Results:
        """All results so far."""
        return self._collected.results()

    @property
    def rows(self) -> list[Row]:
        """One row for each case with a finished run."""
        return self.results.rows

    def run(self, progress: Progress | None = None) -> Sweep:
        """Run the trials that have not run yet; each writes its files when it has ended.

        Raises `SweepError` after the first run if the script does not train or report the metric,
        and at the end if trials were lost, for example with a node.  No trial is left running.
        """
        program, file = self._program, self._file.resolve()
        if self._options.runs_in_copies and file.is_relative_to(Path.cwd()):
            relative = str(file.relative_to(Path.cwd()))  # names the file in the copy
            program = program if program.is_module else Program(relative)
        runner = Runner(
            program, self.arguments,
            self._directory.runs.resolve(),  # a trial in a copy has another current folder
            metrics=self._options.metrics,
            timeout=self._options.timeout, processes=self._options.nproc_per_node,
            override_seeds=self._options.override_seeds, probe=self._options.probe,
            in_copy=self._options.runs_in_copies,
        )  # fmt: skip
        try:
            display, engine = progress or Progress(), engines.make(self._options)
            with display, engine:
                if self._resume_note:
                    display.said(self._resume_note)
                self._coordinator.run(runner, engine, display)
        except EngineError as error:
            raise SweepError(str(error)) from None
        finally:
            self.close()
        return self

    def close(self) -> None:
        """Release the directory for other sweeps."""
        self._directory.release()

    def _settings(self) -> dict[str, Any]:
        """The settings that a resumed sweep must share."""
        return {
            "script": self.script if self._program.is_module else str(self._file.resolve()),
            "script_sha256": hashlib.sha256(self._file.read_bytes()).hexdigest(),
            "arguments": self.arguments,
            **self._plan.settings(),
            **self._options.fixed_on_resume(),
            "ampatch": __version__,
            "torch": torch.__version__,
        }
