"""Run a training script at several opt levels and compare them.

    ampatch sweep train.py --levels O0,O1,O2 --seeds 3 --out DIR -- --epochs 2 --seed {seed}

or, from Python, `sweep("train.py", ["--epochs", "2"], seeds=3)`.  Each run is a
fresh process, and the script is not edited: its `ampatch.initialize` reads opt
level, dtype and settings from the environment.

The seed reaches the script in three ways: as `{seed}` in its arguments, as the
variable `AMPATCH_SEED`, and by torch, `random` and numpy being seeded before it
starts, which serves scripts that seed nothing themselves.

A script that sets variables such as `OMP_NUM_THREADS` for itself finds torch
imported already; set them in the shell instead.

`plan.py` is what is run, `directory.py` where; `runner.py` is the parent's side
of a run, `child.py`, `recorder.py` and `autocast_engine.py` the child's.
`record.py` is what a run measured, `figures.py` and `summary.py` the figures
made of it, `judge.py` the verdicts, `results.py` the format of it all,
`table.py` and `files.py` how it is shown; `report.py` makes pictures (`curves.py`,
`plots.py`) and the HTML page (`page.py`) of it, `events.py` TensorBoard's files.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ampatch._version import __version__
from ampatch.errors import AmpatchError
from ampatch.launch.script import check_script
from ampatch.sweep.directory import Directory, choose
from ampatch.sweep.figures import OK, status
from ampatch.sweep.files import write_files
from ampatch.sweep.judge import LOSS, recommendation
from ampatch.sweep.machine import versions
from ampatch.sweep.plan import (
    DTYPES,
    LEVELS,
    WITHOUT_AMP,
    cases,
    counts_its_steps,
    directions,
    order,
    patterns,
)
from ampatch.sweep.progress import Progress, Silent
from ampatch.sweep.record import Case, Planned, Run
from ampatch.sweep.report import write_report
from ampatch.sweep.results import SUMMARY, Results, Row, read_results, read_runs
from ampatch.sweep.runner import Runner
from ampatch.sweep.summary import seeds_matter, summarize

__all__ = [
    "DTYPES",
    "LEVELS",
    "Case",
    "Planned",
    "Results",
    "Row",
    "Run",
    "Sweep",
    "SweepError",
    "cases",
    "read_results",
    "read_runs",
    "sweep",
    "write_report",
]


class SweepError(AmpatchError):
    """A sweep cannot go on in a useful way; what it has measured is kept."""


class Sweep:
    """A script and what it is run at; `runs` grows while `run` goes on.

    Args:
        script, arguments: the script's file and its own arguments, in which `{seed}`
            and `{steps}` are replaced.
        levels, dtypes: of "O0" to "O3" (by default all), and of "float16", "bfloat16".
        seeds: how many (0, 1, 2, ...); accuracy is tested with two or more.
        repeats: how often each seed runs, for more timings.
        steps: end each run after so many optimizer steps.  With `{steps}` in the arguments
            the script is told instead, and ends by itself.
        overrides: rows more, such as "O2 keep_batchnorm_fp32=False".
        metrics: by name, regular expressions over the output; the group is the number.
        judge: the metric (or "last loss") that the verdicts are about; by default the first.
        better: of metrics, whether "higher" or "lower" is; by default as the name has it.
        autocast: a row per dtype with torch.autocast and GradScaler.
        auto: the script has no AMP code and runs as under `ampatch run --auto`; for O0 and
            O1 alone, the default then.
        out: the directory, by default `ampatch-sweep/` and the script's name.
        timeout: seconds after which a run is ended.
        resume: go on with the sweep in the directory; it must have the same settings.
        overwrite: replace the sweep in the directory.

    On a CUDA device there is a row `O0+tf32` beside O0: `O0` is as PyTorch comes, matrix
    products in FP32 and cuDNN's convolutions as `torch.backends.cudnn.allow_tf32` says.

    Raises `FileNotFoundError` or `ValueError` for what cannot be run, and `OSError`
    for a directory that cannot be written.  Holds the directory until `close`,
    which `run` calls.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        levels: Iterable[str] | None = None,
        dtypes: Iterable[str] = DTYPES[:1],
        seeds: int = 1,
        repeats: int = 1,
        steps: int | None = None,
        overrides: Iterable[str] = (),
        metrics: Mapping[str, str] | None = None,
        judge: str | None = None,
        better: Mapping[str, str] | None = None,
        autocast: bool = True,
        auto: bool = False,
        out: str | Path | None = None,
        timeout: float | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        check_script(str(script))
        self.script = str(script)
        self.arguments = [str(argument) for argument in arguments]
        if levels is None:
            levels = WITHOUT_AMP if auto else LEVELS
        self.cases = cases(
            levels, dtypes, overrides, autocast, tf32=torch.cuda.is_available(), auto=auto
        )
        for name, value in (("seeds", seeds), ("repeats", repeats), ("steps", steps)):
            _check_count(name, value)
        if counts_its_steps(self.arguments) and steps is None:
            raise ValueError("{steps} is among the script's arguments: give --steps N as well.")
        self.planned = order(self.cases, seeds, repeats)
        self._steps, self._timeout, self._auto = steps, timeout, auto
        self._metrics, self._judge, self._better = (
            patterns(metrics or {}),
            judge,
            directions(better or {}),
        )
        path = choose(out, self.script, resume, overwrite)
        self.directory = path
        self._held = Directory(path, self._settings(seeds, repeats), resume, overwrite)
        found = self._held.finished(self.planned, timeout)
        self.runs: list[Run] = [found[one] for one in self.planned if one in found]
        earlier = self._held.earlier
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._started = now if earlier is None else earlier.started
        self._write()

    @property
    def results(self) -> Results:
        """Everything that is known by now."""
        rows = summarize(self.runs, self._judge, self._better)
        return Results(
            script=self.script,
            arguments=self.arguments,
            started=self._started,
            planned=len(self.planned),
            settings=self._held.settings,
            versions=versions(),
            rows=rows,
            done=len(self.runs),
            recommendation=recommendation(rows),
            notes=self._notes(),
        )

    @property
    def rows(self) -> list[Row]:
        """One per case of which a run has ended."""
        return self.results.rows

    @property
    def table_file(self) -> Path:
        """The JSON file with all rows."""
        return self.directory / SUMMARY

    def run(self, progress: Progress | None = None) -> Sweep:
        """Run what has not run yet, one after the other; the files grow with each.

        Raises `SweepError` after the first run that shows that the script does not
        train, or reports no such metric.
        """
        runner = Runner(
            self.script,
            self.arguments,
            self._held.runs,
            steps=self._steps,
            metrics=self._metrics,
            timeout=self._timeout,
            auto=self._auto,
        )
        done = {run.planned for run in self.runs}
        try:
            with progress or Silent() as shown:
                for number, planned in enumerate(self.planned, start=1):
                    if planned not in done:
                        self._run_one(runner, planned, number, shown)
        finally:
            self.close()
        return self

    def close(self) -> None:
        """Let other sweeps have the directory."""
        self._held.release()

    def _run_one(self, runner: Runner, planned: Planned, number: int, shown: Progress) -> None:
        shown.started(number, len(self.planned), planned)
        try:
            run = runner.run(planned, shown)
        except ValueError as error:  # what a pattern found is no number
            raise SweepError(str(error)) from None
        self.runs.append(run)
        self._write()
        shown.ended(run)
        self._check_training(run)
        self._check_metrics(run)

    def _check_training(self, run: Run) -> None:
        """A script that does not train at O0 will not at other levels: say so at once."""
        said = status(run)
        if said.startswith("no training") and len(self.runs) < len(self.planned):
            raise SweepError(f"{self.script}: {said} ({run.planned.label}).")

    def _check_metrics(self, run: Run) -> None:
        """A metric that the first good run lacks is a slip: say so before hours have gone by."""
        if status(run) != OK:
            return
        there = [*run.measured.metrics, *([LOSS] if run.measured.losses else [])]
        log = f"{self._held.runs.name}/{run.planned.file_stem}.log"
        for name, pattern in self._metrics.items():
            if name not in there:
                raise SweepError(
                    f"--metric {name}={pattern}: nothing in the output of {run.planned.label} "
                    f"matches ({log} in {self.directory})."
                )
        for name in [*([self._judge] if self._judge else []), *self._better]:
            if name not in there:
                raise SweepError(
                    f"--judge or --better: {self.script} reports no {name!r}. Expected one of: "
                    f"{', '.join(map(repr, there)) or 'nothing; see ampatch.log_metrics'}."
                )

    def _notes(self) -> list[str]:
        notes = []
        if not seeds_matter(self.runs):
            notes.append(
                "The seed does not reach the script: O0 is the same with each. Pass it on in the "
                "script's arguments, such as -- --seed {seed}; accuracy is not tested like this."
            )
        if any(run.measured and run.measured.stopped_at for run in self.runs):
            notes.append(
                f"Runs were ended after {self._steps} steps; metrics that the script reports at "
                "its end are missing then. Give it {steps} among its arguments to let it end."
            )
        return notes

    def _write(self) -> None:
        write_files(self.directory, self.results)

    def _settings(self, seeds: int, repeats: int) -> dict[str, Any]:
        """What makes this sweep another than one with other settings."""
        return {
            "script": str(Path(self.script).resolve()),
            "script_sha256": hashlib.sha256(Path(self.script).read_bytes()).hexdigest(),
            "arguments": self.arguments,
            "rows": [case.label for case in self.cases],
            "seeds": seeds,
            "repeats": repeats,
            "steps": self._steps,
            "auto": self._auto,
            "metrics": self._metrics,
            "ampatch": __version__,
            "torch": torch.__version__,
        }


def sweep(
    script: str, arguments: Sequence[str] = (), *, progress: Progress | None = None, **options: Any
) -> list[Row]:
    """Run `script` with `arguments` at each opt level and dtype; returns the rows.

    `options` are those of `Sweep`.  O0 runs once per seed, since no half type plays
    a part in it.  A run that crashes, diverges or takes longer than `timeout`
    seconds does not end the sweep; its row's `status` says so.
    """
    return Sweep(script, arguments, **options).run(progress).rows


def _check_count(name: str, value: int | None) -> None:
    if value is None and name == "steps":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"sweep({name}={value!r}): expected a whole number, at least 1.")
