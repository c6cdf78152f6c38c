"""A sweep: the trials of its plan, run by an engine, and the results so far."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ampatch._version import __version__
from ampatch.config.validation import whole_number
from ampatch.errors import AmpatchError
from ampatch.launch.program import Program
from ampatch.sweep.execution import engines
from ampatch.sweep.execution.default_dtypes import default_dtypes
from ampatch.sweep.execution.directory import Directory, choose
from ampatch.sweep.execution.early_stops import failure, reason_to_stop
from ampatch.sweep.execution.engines.options import Where, names
from ampatch.sweep.execution.engines.protocol import (
    Ended,
    EngineError,
    Event,
    Lost,
    Reached,
    Started,
)
from ampatch.sweep.execution.engines.schedule import Schedule
from ampatch.sweep.execution.progress import Progress, Silent
from ampatch.sweep.execution.run_files import RunFiles
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.execution.short_runs import is_due, short_steps
from ampatch.sweep.kinds import NO_AMP, TORCH_AMP, UNKNOWN, Kind
from ampatch.sweep.measure import provenance
from ampatch.sweep.measure.machine import versions
from ampatch.sweep.measure.record import Run
from ampatch.sweep.plan import (
    DTYPES,
    ROUNDS,
    cases,
    counts_its_steps,
    directions,
    is_timed,
    patterns,
    trials,
)
from ampatch.sweep.report import own_seeds, paired
from ampatch.sweep.report.figures import OK, status
from ampatch.sweep.report.judge import LOSS
from ampatch.sweep.report.machine_state import machine_state
from ampatch.sweep.report.recommendation import Margin, recommendation
from ampatch.sweep.report.results import SUMMARY, Results, Row, read_results
from ampatch.sweep.report.starts import checked, other_starts
from ampatch.sweep.report.starts import note as starts_note
from ampatch.sweep.report.summary import seeds_matter, summarize
from ampatch.sweep.report.summary_files import write_files
from ampatch.sweep.trial import BASE, Case, Trial
from ampatch.torch_private.devices import has_tf32


class SweepError(AmpatchError):
    """A sweep cannot go on in a useful way; what it has measured is kept."""


class Sweep:
    """A script and the trials to run it in; `runs` grows while `run` goes on.

    Args:
        script: the script's file, or with `module` the name of a module.
        arguments: the script's own, in which `{seed}`, `{steps}` and `{trial_dir}` (an empty
            directory for each trial) are replaced.
        module: run `script` as by `python -m`.
        levels: some of "O0" to "O3"; by default all that a script of its kind can have.
        dtypes: half dtypes, of "float16" and "bfloat16"; by default those that
            `ampatch doctor` calls fast on this machine, and bfloat16 if it calls none so.
        seeds: the number of seeds (0, 1, 2, ...); accuracy is tested with two or more.
        override_seeds: where the script seeds torch, numpy or `random` itself, its seeds become
            those of the trial.
        repeats: how often each seed runs.
        rounds: how often speed is measured, at least: whole runs count, short runs follow.
        steps: end each run after so many optimizer steps.  With `{steps}` in the arguments
            the script gets the number instead, and ends by itself.
        overrides: additional rows, such as "O2 loss_scale=128".
        metrics: regular expressions over the output, by name; the group is the number.
        judge: the metric (or "last loss") that the verdicts are about; by default the first.
        margin: the smallest difference from O0 that matters in what is judged: a number, or a part
            of O0's value ("1%", the default).  A row is recommended only if the test would have
            seen one.
        better: for metrics, "higher" or "lower"; by default the metric's name decides.
        autocast: add a row for each dtype with torch.autocast and GradScaler, or the script as
            it is where it uses these itself.
        auto: as by default: a script without AMP code is recognized.
        out: the directory, by default `ampatch-sweep/` and the script's name.
        timeout: seconds after which a run is ended.
        engine: what runs the trials: "local", "ray" or "slurm".
        devices: such as "cuda:0,cuda:1"; a trial each, for accuracy, and the first for timing.
        jobs: run so many trials at a time, for accuracy; timed ones run alone.
        address: of a Ray cluster; "auto" finds a running one, and without it Ray is started.
        gpus_per_trial: how many GPUs a trial asks of a cluster.
        cpus_per_trial: how many cores.
        slurm: parameters for submitit, such as {"partition": "gpu", "timeout_min": 120}.
        nproc_per_node: processes of a trial, started by torchrun; rank 0 reports.
        resume: go on with the sweep in the directory; it must have the same settings.
        overwrite: replace the sweep in the directory.

    The first run at O0 shows what kind of script it is (`kinds.py`); the rows follow from that.

    On a CUDA device there is a row `O0+tf32` beside O0.  `O0` has PyTorch's defaults: matrix
    products in FP32, cuDNN's convolutions as `torch.backends.cudnn.allow_tf32` says.

    Raises `FileNotFoundError`, `ImportError`, `TypeError` or `ValueError` for what cannot be run,
    and `OSError` for a directory that cannot be written.  Holds the directory until `close`,
    which `run` calls.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        module: bool = False,
        levels: Iterable[str] | None = None,
        dtypes: Iterable[str] | None = None,
        seeds: int = 1,
        override_seeds: bool = False,
        repeats: int = 1,
        rounds: int = ROUNDS,
        steps: int | None = None,
        overrides: Iterable[str] = (),
        metrics: Mapping[str, str] | None = None,
        judge: str | None = None,
        margin: str | None = None,
        better: Mapping[str, str] | None = None,
        autocast: bool = True,
        auto: bool = False,
        out: str | Path | None = None,
        timeout: float | None = None,
        engine: str = "local",
        devices: str | Iterable[str] | None = None,
        jobs: int | None = None,
        address: str | None = None,
        gpus_per_trial: float | None = None,
        cpus_per_trial: int | None = None,
        slurm: Mapping[str, Any] | None = None,
        nproc_per_node: int | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self._program = Program(str(script), module)
        self._file = self._program.file()
        self.script = str(self._program)
        self.arguments = [str(argument) for argument in arguments]
        path = choose(out, self._program.title, resume, overwrite)
        self._kind = _kind_in(path) if resume else UNKNOWN
        self._rows = functools.partial(
            cases,
            None if levels is None else _listed(levels),
            overrides=list(overrides),
            autocast=autocast,
            tf32=has_tf32(),
        )
        dtypes = None if dtypes is None else _listed(dtypes)
        asked_cases = self._rows(DTYPES if dtypes is None else dtypes, kind=self._kind)
        seeds, repeats = _count("seeds", seeds), _count("repeats", repeats)
        rounds = _count("rounds", rounds)
        steps = None if steps is None else _count("steps", steps)
        if counts_its_steps(self.arguments) and steps is None:
            raise ValueError("{steps} is among the script's arguments: give --steps N as well.")
        self._where = Where(
            engine,
            names(devices),
            jobs,
            address,
            gpus_per_trial,
            cpus_per_trial,
            slurm or {},
            nproc_per_node,
        )
        self._steps, self._timeout = steps, timeout
        self._metrics, self._better = patterns(metrics or {}), directions(better or {})
        self._judge, self._override_seeds = judge, override_seeds
        self._margin = Margin.of(margin)
        if dtypes is None:  # last: what is wrong above is said before anything is timed
            in_half = any(case.dtype in DTYPES for case in asked_cases)
            dtypes = default_dtypes(path, resume) if in_half else DTYPES
        self._dtypes, self._repeats = dtypes, (seeds, repeats, rounds)
        self.runs: list[Run] = []
        self.told: set[Case] = set()  # of which a failure was shown with its last lines
        self._begun: set[Trial] = set()
        self._plan()
        self.directory = path
        self._held = Directory(path, self._settings(), resume, overwrite)
        found = self._held.finished(self.trials, timeout)
        for run in (found[trial] for trial in self.trials if trial in found):
            if not self._reason_to_stop(run):  # what ended the sweep then may be mended now
                self.runs.append(run)
                self._begun.add(run.trial)
        earlier = self._held.earlier
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._started = now if earlier is None else earlier.started
        self._provenance = (
            provenance.begun(self._file)
            if earlier is None
            else provenance.resumed(self._file, earlier.provenance)
        )
        self._write()

    def _plan(self) -> None:
        """The rows and trials that the kind of the script has."""
        self.cases = self._rows(self._dtypes, kind=self._kind)
        self.trials = trials(self.cases, *self._repeats, apart=self._where.side_by_side)
        self._order = {trial: number for number, trial in enumerate(self.trials)}

    @property
    def results(self) -> Results:
        """All results so far."""
        rows = summarize(self.runs, self._judge, self._better)
        done = {run.trial for run in self.runs}
        return Results(
            script=self.script,
            arguments=self.arguments,
            started=self._started,
            planned=sum(trial in done or is_due(trial, self.runs) for trial in self.trials),
            settings=self._held.settings,
            versions=versions(),
            machine={**self._facts(), **machine_state(self.runs)},
            rows=rows,
            done=len(self.runs),
            recommendation=self._baseline_trouble() or recommendation(rows, self._margin),
            notes=self._notes(),
            provenance={**self._provenance, **provenance.devices(self.runs)},
        )

    @property
    def rows(self) -> list[Row]:
        """One row for each case of which a run has ended."""
        return self.results.rows

    @property
    def table_file(self) -> Path:
        """The JSON file with all rows."""
        return self.directory / SUMMARY

    def run(self, progress: Progress | None = None) -> Sweep:
        """Run the trials that have not run yet; each adds to the files when it has ended.

        Raises `SweepError` after the first run that shows that the script does not
        train, or reports no such metric; and at the end, if trials were lost with what ran
        them.  What was submitted ends with this call.
        """
        runner = Runner(
            self._program,
            self.arguments,
            self._held.runs,
            steps=self._steps,
            metrics=self._metrics,
            timeout=self._timeout,
            processes=self._where.nproc_per_node,
            override_seeds=self._override_seeds,
        )
        lost: list[Lost] = []
        try:
            schedule = self._schedule(runner)
            with progress or Silent() as shown, engines.make(self._where, self.directory) as engine:
                for event in schedule.run(engine):
                    if self._recognize(event, shown):
                        schedule.plan(*self._left())
                    self._note(event, shown, lost)
        except EngineError as error:
            raise SweepError(str(error)) from None
        finally:
            self.close()
        if lost:
            labels = ", ".join(f"{one.trial.label} ({one.reason})" for one in lost)
            raise SweepError(f"Lost with their workers: {labels}. --resume runs them again.")
        return self

    def close(self) -> None:
        """Release the directory for other sweeps."""
        self._held.release()

    def _schedule(self, runner: Runner) -> Schedule:
        """The trials to come: those that may run beside others, then those that run alone."""
        others, timed = self._left()
        return Schedule(
            others,
            timed,
            runner_for=lambda trial: self._runner_for(trial, runner),
            proven=bool(self.runs),
        )

    def _left(self) -> tuple[list[Trial], list[Trial]]:
        """The trials that run beside each other, and those that run alone; O0 shows the kind."""
        left = self._to_start()
        first = next((trial for trial in left if trial.case == BASE), None)
        is_open = not self._kind and all(run.case != BASE for run in self.runs)
        if first is not None and is_open:
            left.remove(first)
            left.insert(0, first)
        beside = self._where.side_by_side
        return (
            [trial for trial in left if beside and not is_timed(trial)],
            [trial for trial in left if not beside or is_timed(trial)],
        )

    def _to_start(self) -> list[Trial]:
        return [trial for trial in self.trials if trial not in self._begun]

    def _recognize(self, event: Event, shown: Progress) -> bool:
        """Whether an event shows the kind of the script, which was unknown: the plan is made anew.

        Raises `SweepError` for rows that were asked for and that this kind cannot have.
        """
        kind = UNKNOWN
        if isinstance(event, Reached):
            kind = event.reach.kind
        elif isinstance(event, Ended) and event.run.measured is not None:
            kind = event.run.measured.kind
        shows_more = self._kind.name == NO_AMP and kind.name == TORCH_AMP
        if not kind or (self._kind and not shows_more):
            return False
        self._kind = kind
        try:
            self._plan()
        except ValueError as error:
            raise SweepError(f"{self.script}: {error}") from None
        self._held.settings.update(self._settings())
        shown.said(f"{self.script} {kind.in_words()}.")
        return True

    def _runner_for(self, trial: Trial, runner: Runner) -> Runner | None:
        """The runner of a trial that is about to start; None if it is not worth its time."""
        if not is_due(trial, self.runs):
            return None
        runner = dataclasses.replace(runner, kind=self._kind)
        return dataclasses.replace(runner, steps=self._short_steps()) if trial.short else runner

    def _reason_to_stop(self, run: Run) -> str:
        log = RunFiles.of(self._held.runs, run.trial).log
        return reason_to_stop(self.script, self.runs, run, log)

    def _short_steps(self) -> int | None:
        """The steps of a short run: no more than those of a whole one, if that has a number."""
        return min(filter(None, (self._steps, short_steps(self.runs))), default=None)

    def _note(self, event: Event, shown: Progress, lost: list[Lost]) -> None:
        if isinstance(event, Started):
            self._begun.add(event.trial)
            left = self._to_start()
            number = len(self.trials) - len(left)
            short_later = sum(trial.short for trial in left)
            shown.started(number, len(self.trials), event.trial, short_later)
        elif isinstance(event, Reached):
            shown.reached(event.trial, event.reach.steps, event.reach.loss)
        elif isinstance(event, Lost):
            lost.append(event)
            shown.lost(event.trial, event.reason)
        elif isinstance(event, Ended):
            self._ended(event.run, shown)
        elif isinstance(event.error, ValueError):  # a pattern matched what is not a number
            raise SweepError(str(event.error)) from None
        else:
            raise event.error

    def _ended(self, run: Run, shown: Progress) -> None:
        reason = self._reason_to_stop(run)
        known = self._script_notes()
        self.runs.append(run)
        self.runs.sort(key=lambda run: self._order[run.trial])  # they may end in any order
        self._write()
        shown.ended(run)
        for note in self._script_notes():
            if note not in known:
                shown.said(note)
        if status(run) != OK and run.case not in self.told:
            self.told.add(run.case)
            if not reason:
                shown.said(failure(run, RunFiles.of(self._held.runs, run.trial).log))
        if reason and len(self.runs) < len(self.trials):
            raise SweepError(reason)
        if reason:
            shown.said(reason)
        self._check_metrics(run)

    def _check_metrics(self, run: Run) -> None:
        """A metric that the first good run lacks is a mistake: stop before hours have passed."""
        if run.trial.short or status(run) != OK:
            return
        reported = [*run.measured.metrics, *([LOSS] if run.measured.losses else [])]
        log = f"{self._held.runs.name}/{run.trial.file_stem}.log"
        for name, pattern in self._metrics.items():
            if name not in reported:
                raise SweepError(
                    f"--metric {name}={pattern}: nothing in the output of {run.trial.label} "
                    f"matches ({log} in {self.directory})."
                )
        for name in [*([self._judge] if self._judge else []), *self._better]:
            if name not in reported:
                raise SweepError(
                    f"--judge or --better: {self.script} reports no {name!r}. Expected one of: "
                    f"{', '.join(map(repr, reported)) or 'nothing; see ampatch.log_metrics'}."
                )

    def _notes(self) -> list[str]:
        notes = self._timing_notes()
        if not paired.available() and any(run.trial.seed for run in self.runs):
            notes.append(paired.MISSING)
        notes += self._script_notes()
        whole = [run.measured for run in self.runs if run.measured and not run.trial.short]
        if any(measured.stopped_at for measured in whole):
            notes.append(
                f"Runs were ended after {self._steps} steps; metrics that the script reports at "
                "its end are missing then. Give it {steps} among its arguments to let it end."
            )
        return notes

    def _timing_notes(self) -> list[str]:
        """Which figures were timed alone, and whether on one machine."""
        timed = [run for run in self.runs if run.alone]
        notes = []
        if self.runs and not timed:
            more = "" if any(map(is_timed, self.trials)) else " --rounds 3 adds runs that do."
            notes.append(f"No run ran alone on its device: no step time, no speed.{more}")
        elif len(timed) < len(self.runs):
            notes.append(
                f"Step time and speed are of the {len(timed)} of {len(self.runs)} runs that ran "
                "alone on their device; the others ran beside each other, for accuracy."
            )
        measured = [run for run in timed if run.measured and run.measured.device]
        places = {f"{run.host} ({run.measured.device})" for run in measured}
        if len(places) > 1:
            notes.append(
                f"Timed runs are from several machines or devices, {', '.join(sorted(places))}: "
                "compare their speed only within one of them."
            )
        return notes

    def _script_notes(self) -> list[str]:
        """What the script does that a sweep has to tell: about seeds, autocast and weights."""
        starts = other_starts(self.runs)
        notes = [*self._seed_notes(), self._autocast_note()]
        return [note for note in [*notes, starts_note(self.script, starts, self.runs)] if note]

    def _baseline_trouble(self) -> str:
        """Why there is nothing in FP32 to compare with."""
        if not self._kind.half_weights:
            return ""
        return (
            f"none: O0 is not FP32. {self.script} trains weights in "
            f"{' and '.join(self._kind.half_weights)} by itself (model.half(), a default dtype, a "
            "framework's pure half precision). Expected FP32 weights; leave half to the levels."
        )

    def _facts(self) -> dict[str, str]:
        """What the script is, and what was checked of its runs."""
        facts = {"script": self._kind.in_words() if self._kind else "", "checked": ""}
        if not other_starts(self.runs) and not self._kind.half_weights:
            facts["checked"] = checked(self.runs)
        return {name: text for name, text in facts.items() if text}

    def _autocast_note(self) -> str:
        """Where the script enters torch.autocast beside its `initialize`."""
        measured = (run.measured for run in self.runs if run.measured is not None)
        places = list(dict.fromkeys(place for one in measured for place in one.autocast_off))
        if not places or self._kind.is_foreign:
            return ""
        return (
            f"{self.script} enters torch.autocast itself ({', '.join(places)}). At O0 these "
            "regions are off, or O0 would not be FP32; in the other rows they are on."
        )

    def _seed_notes(self) -> list[str]:
        """What a sweep of several seeds says about seeds that the script sets itself."""
        if all(trial.seed == 0 for trial in self.trials):
            return []
        label = self.cases[0].label
        of_first_row = [run for run in self.runs if run.case.label == label and not run.trial.short]
        constant = own_seeds.constant_seeds(of_first_row, self.arguments)
        notes = [own_seeds.notice(self.script, constant, self._override_seeds)]
        if not seeds_matter(self.runs):
            notes.append(own_seeds.not_reached(constant, self._override_seeds))
        return [note for note in notes if note]

    def _write(self) -> None:
        write_files(self.directory, self.results)

    def _settings(self) -> dict[str, Any]:
        """The settings that a resumed sweep must share."""
        seeds, repeats, rounds = self._repeats
        return {
            "script": self.script if self._program.is_module else str(self._file.resolve()),
            "script_sha256": hashlib.sha256(self._file.read_bytes()).hexdigest(),
            "arguments": self.arguments,
            "kind": self._kind.to_json(),
            "dtypes": self._dtypes,
            "rows": [case.label for case in self.cases],
            "seeds": seeds,
            "override_seeds": self._override_seeds,
            "repeats": repeats,
            "rounds": rounds,
            "steps": self._steps,
            "metrics": self._metrics,
            "nproc_per_node": self._where.nproc_per_node,
            "side_by_side": self._where.side_by_side,
            "ampatch": __version__,
            "torch": torch.__version__,
        }


def _kind_in(path: Path) -> Kind:
    """The kind that an earlier part of the sweep in this directory has recognized."""
    earlier = read_results(path)
    return UNKNOWN if earlier is None else Kind.from_json(earlier.settings.get("kind"))


def _listed(names: str | Iterable[str]) -> list[str]:
    """One name, or several."""
    return [names] if isinstance(names, str) else list(names)


def _count(name: str, value: int) -> int:
    return whole_number(f"sweep({name}={value!r})", value, least=1)
