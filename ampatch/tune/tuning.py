"""Tuning: the level as it is, then the probe, the search by trials, and what the cure costs."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampatch.config.opt_levels import properties_for
from ampatch.config.sweep_options import ROUNDS, SweepOptions
from ampatch.config.validation import whole_number
from ampatch.launch.program import Program
from ampatch.sweep import Sweep
from ampatch.sweep.execution.directory import locked
from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.json_files import read_json, restored, write_json
from ampatch.sweep.measure.record import Measured, Run, Series
from ampatch.sweep.report.figures import OK, status
from ampatch.sweep.report.margin import Margin
from ampatch.sweep.report.pace import in_words
from ampatch.sweep.report.paired import available
from ampatch.sweep.report.recommendation import not_shown
from ampatch.sweep.report.results import RUNS, Row
from ampatch.sweep.report.summary import says_how_well, seeds_matter
from ampatch.sweep.trial import BASE, Case
from ampatch.tune import remedies
from ampatch.tune.probe import SAMPLES, ProbeOptions
from ampatch.tune.remedies import Remedy
from ampatch.tune.search import Found, most_trials, smallest
from ampatch.tune.sensitivity import Findings, Sensitivity, ranked
from ampatch.tune.verdict import TuneError, passes, reason, row_of, silent

ANSWER = "tune.json"
PAGE = "tune.html"
PROBE, SPEED = "probe", "speed"  # directories
LOCK = ".tune.lock"  # held while no sweep runs in the directory, too
OVERRIDES = "overrides.json"
LEVEL = "level.json"  # what is tuned here, from the beginning on
SEEDS = 6  # of the answer; candidates are sought with half of them
SAME = 1e-3  # relative; the probe has compiled models run eagerly, which differ in bits
LEAST_SEEDS = 4  # so that the search has two: of one there is no test
PASSES, CURED, NO_CURE, UNDECIDED = "passes", "cured", "no cure", "undecided"


@dataclass
class Answer:
    """What was found; the content of `tune.json`.

    `outcome` is "passes" (the level needs nothing), "cured" (`needed` brings it back), "no cure"
    (not even all modules in FP32 and the `settings_tried` do), or "undecided": the candidates were
    used up before one passed.  `speeds` are medians relative to O0
    and `step_ms` medians in milliseconds, by row; `paces` says what the machine tells of them.
    """

    script: str
    opt_level: str
    dtype: str
    outcome: str
    needed: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    line: str = ""
    settings_tried: dict[str, Any] = field(default_factory=dict)  # those that the level lacks
    is_smallest: bool = True
    candidates: int = 0
    failure: str = ""  # of the level as it is, where nothing cures it
    unseen: float | None = None  # the smallest difference in what is judged that would be seen
    judged: str = ""
    not_shown: str = ""  # of a level or cure that passes: what the seeds were too few for
    modules: list[Sensitivity] = field(default_factory=list)  # the most sensitive first
    paths: list[str] = field(default_factory=list)  # of all modules
    uncalled: list[str] = field(default_factory=list)  # modules that the probe did not see
    step_ms: dict[str, float] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    paces: dict[str, str] = field(default_factory=dict)


class Tuning:
    """The trials that find the smallest set of modules in FP32 with which a level trains as O0.

    Args:
        script: the script's file, or with `module` in `options` the name of a module.
        arguments: the script's own, as for `Sweep`.
        opt_level: "O1", "O2" or "O3".
        dtype: "float16" or "bfloat16".
        depth: look at groups, the modules so many names deep; by default at each module.
        probe_steps: optimizer steps of the run in which modules are computed in half as well.
        rounds: of the timing of the answer beside the level and O0.
        candidates: how many sets are tried at most; by default about 2 log2(n) for n modules.
        out: the directory, by default `ampatch-tune/` and the script's name.
        options: others of `Sweep`: seeds (6 by default), metrics, judge, margin, better, timeout,
            engines, `resume` and `overwrite`.

    Raises what `Sweep` raises, and `ImportError` without scipy.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        opt_level: str,
        dtype: str = "float16",
        depth: int | None = None,
        probe_steps: int = 100,
        candidates: int | None = None,
        rounds: int = ROUNDS,
        out: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        progress: Callable[[], Progress | None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        seeds = options.get("seeds", SEEDS)
        whole_number(f"--seeds {seeds}", seeds, least=LEAST_SEEDS)
        if not available():
            raise ImportError(
                "ampatch tune judges its trials by tests from scipy, which is not installed. "
                'pip install "ampatch[sweep]"'
            )
        self._script, self._arguments = script, arguments
        program = Program(str(script), options.get("module", False))
        self.directory = Path("ampatch-tune") / program.title if out is None else Path(out)
        self._level = Case(opt_level, dtype)
        self._depth, self._probe_steps, self._most = depth, probe_steps, candidates
        self._rounds = rounds
        self._options = {**options, "seeds": seeds}
        self._margin = Margin.of(options.get("margin"))
        self._progress, self._say = progress, say
        self._seeds, self._few = seeds, (seeds + 1) // 2
        self._cases = [BASE, self._level]
        self._with_all_seeds: set[Case] = set()
        self._confirms = False  # each candidate that passes, and not the answer alone
        self._runs: list[Run] = []
        self._paths: Sequence[str] = ()
        self._tried = 0
        self._settings: dict[str, Any] = {}
        self._lock = locked(self, self.directory, LOCK, "tuning")
        try:
            self._sweep = self._begun(resume, overwrite)
        except BaseException:
            self._lock()
            raise

    def run(self) -> Answer:
        """Run the trials that have not run yet; returns the answer, which is in the files, too.

        Raises `SweepError` or `TuneError` where there is none.
        """
        try:
            return self._tuned()
        finally:
            self._lock()

    def _tuned(self) -> Answer:
        row = self._row(self._level, self._level.label, confirms=True)
        if passes(row):
            return self._ended(PASSES, Found((), True, True, 0), row, Findings())
        self._confirms = self._level in self._with_all_seeds  # it passed with few
        self._say(f"{self._level.label} fails: {reason(row)}")
        findings = self._findings()
        self._paths = findings.paths
        listed = remedies.possible(findings, self._properties(), self._level.dtype or "")
        most = most_trials(len(listed)) if self._most is None else self._most
        self._settings = remedies.settings(listed)
        found = self._found(listed, most)
        if not found.passes:
            outcome = NO_CURE if found.is_decided else UNDECIDED
            return self._ended(outcome, found, row, findings)
        cure = self._case(found.needed)
        answer = self._ended(CURED, found, self._run(cure), findings)
        return self._timed(answer, cure, row)

    def _found(self, listed: Sequence[Remedy], most: int) -> Found[Remedy]:
        """The smallest set, which passes with all seeds.

        A set that passed with few seeds and does not with all shows that few are not enough for
        this script: then the search is made again, and what has passed in it runs with all.
        """
        self._say(
            f"{len(listed)} remedies to choose from, by at most {most} candidates. One that fails "
            f"has {self._few} seeds, {'one that passes' if self._confirms else 'the answer'} has "
            f"{self._seeds}."
        )
        self._tried = 0
        found = smallest(listed, self._candidate_passes, most)
        if not found.passes or self._confirms:
            return found
        row = self._row(self._case(found.needed), "The answer", confirms=True)
        if passes(row):
            return found
        self._say(
            f"The answer fails: {reason(row)}. {self._few} seeds are too few here. The search is "
            "made again; what has run is kept."
        )
        self._confirms = True
        return self._found(listed, most)

    def _case(self, chosen: Iterable[Remedy]) -> Case:
        return remedies.case(self._level, chosen, self._paths)

    def _begun(self, resume: bool, overwrite: bool) -> Sweep:
        """The first sweep of the directory; none of an earlier tuning for another level."""
        if resume and not overwrite:
            self._refuse_another()
        sweep = self._main(resume=resume, overwrite=overwrite)
        if overwrite:
            self._clear()
        write_json(self.directory / LEVEL, self._asked())
        return sweep

    def _resumed(self) -> Sweep:
        """The sweep with what has come to it since.  What it refuses now has changed meanwhile."""
        try:
            return self._main(resume=True)
        except ValueError as error:
            raise TuneError(f"{self._script} changed while it was tuned: {error}") from error

    def _main(self, resume: bool, overwrite: bool = False) -> Sweep:
        """The sweep of all candidates so far, in one directory that grows."""
        few = set(self._cases) - self._with_all_seeds
        return Sweep(
            self._script,
            self._arguments,
            rows=self._cases,
            fewer_seeds=dict.fromkeys(few, self._few),
            rounds=1,
            fail_fast=True,
            out=self.directory,
            resume=resume,
            overwrite=overwrite,
            **self._options,
        )

    def _row(self, case: Case, label: str, confirms: bool) -> Row:
        """The row of a case beside O0; with `confirms` one that passes has all seeds."""
        row = self._run(case)
        if not (confirms and passes(row)):
            return row
        more = self._seeds - self._few
        self._say(f"{label} passes with {self._few} seeds; {more} more: started")
        self._with_all_seeds |= {BASE, case}
        return self._run(case)

    def _run(self, case: Case) -> Row:
        """The row of a case, whose trials run if they have not."""
        progress = None if self._runs else self._progress()
        if case not in self._cases:
            self._cases.append(case)
        if self._runs:
            self._sweep = self._resumed()
        self._runs = self._sweep.run(progress).runs
        judge, better = self._options.get("judge"), self._options.get("better") or {}
        base = row_of(BASE, self._runs, judge, better)
        if base.outcome == "failed":
            raise TuneError(f"O0 has failed: {base.status}. There is nothing to come back to.")
        if not says_how_well(self._runs):
            raise TuneError(
                f"{self._script}: no loss and no metric was recorded at O0, so nothing says how "
                "well a candidate trains. Have a loss go through ampatch.scale_loss or backward(), "
                "or call ampatch.log_metrics(accuracy=...), or give --metric."
            )
        if not seeds_matter(self._runs):
            raise TuneError(
                "O0 is the same with each seed, so no difference can be tested. Have {seed} among "
                "the script's arguments, or give --override-seeds."
            )
        return row_of(case, self._runs, judge, better, self._margin)

    def _candidate_passes(self, chosen: frozenset[Remedy]) -> bool:
        names = ", ".join(sorted(map(str, chosen))[:4]) + (", ..." if len(chosen) > 4 else "")
        self._tried += 1
        label = f"Candidate {self._tried}, {len(chosen)} in place ({names})"
        self._say(f"{label}: started")
        row = self._row(self._case(chosen), label, self._confirms)
        fine = passes(row)
        self._say(f"{label}: {'passes' if fine else f'fails: {reason(row)}'}")
        return fine

    def _refuse_another(self) -> None:
        earlier, asked = read_json(self.directory / LEVEL), self._asked()
        if earlier is not None and earlier != asked:
            raise ValueError(
                f"{self.directory}: holds a tuning of {' in '.join(earlier)}, and --resume goes "
                f"on with that. For {' in '.join(asked)} replace it by --overwrite, or choose "
                "another directory with --out."
            )

    def _asked(self) -> list[str]:
        return [self._level.opt_level, self._level.dtype or ""]

    def _clear(self) -> None:
        """Delete what an earlier tuning in this directory has found."""
        for name in (ANSWER, OVERRIDES, PAGE, LEVEL):
            (self.directory / name).unlink(missing_ok=True)
        for name in (PROBE, SPEED):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    def _findings(self) -> Findings:
        """What the probe found, in a run at O0 of its own; one with other options runs anew."""
        place = self.directory / PROBE
        file = (place / "sensitivity.json").resolve()
        asked, done = self._probe_options(file).to_text(), place / "done"
        found = Findings.read(file) if done.exists() and done.read_text() == asked else None
        if found is None:
            found = self._probe(place, file, asked)
            done.write_text(asked)
        if not found.modules:
            raise TuneError(
                f"{self._script}: no module of a model was seen to compute anything at O0. "
                "Expected a script that calls ampatch.initialize(model, ...) and then the model."
            )
        return found

    def _probe_options(self, file: Path) -> ProbeOptions:
        scale = self._properties()["loss_scale"]
        return ProbeOptions(
            file=str(file),
            steps=self._probe_steps,
            opt_level=self._level.opt_level,
            dtype=self._level.dtype or "",
            scale=None if scale == "dynamic" else float(scale),
            depth=self._depth,
        )

    def _probe(self, place: Path, file: Path, asked: str) -> Findings:
        self._say(
            f"Sensitivity: copies of each module compute {SAMPLES} of its calls in FP32 and in "
            f"{self._level.dtype}, in {self._probe_steps} steps at O0. In memory are those of the "
            "few modules whose turn it is."
        )
        kept = {name: value for name, value in self._options.items() if name in _OF_PROBE}
        sweep = Sweep(
            self._script,
            self._arguments,
            rows=[BASE],
            rounds=1,
            steps=self._probe_steps + 2,
            kind=self._sweep.kind,
            probe=("ampatch.tune.probe", asked),
            out=place,
            overwrite=True,
            **kept,
        )
        [run] = sweep.run(self._progress()).runs
        if status(run) != OK:
            raise TuneError(
                f"The probe's run at O0 {status(run)} (its output: {sweep.directory / RUNS}). "
                "With that put right, --resume goes on. Where memory was short, more --probe-steps "
                "keep fewer copies at once."
            )
        found = Findings.read(file) or Findings()
        self._compare_with_training(run)
        self._say(
            f"{len(found.modules)} modules in {found.steps} steps: {found.seconds:.2g} s beside "
            "the training; copies in memory at once: "
            f"{found.at_once}, of {found.copied / 2**20:.2g} MiB."
        )
        return found

    def _compare_with_training(self, probed: Run) -> None:
        """Say where the losses of the probe's run are not those of O0."""
        plain = next(run for run in self._runs if run.case == BASE and not run.trial.short)
        step = departure(plain.measured or Measured(), probed.measured or Measured())
        if step is not None:
            self._say(
                f"The probe's run departs from that of O0 at step {step + 1}: the script does not "
                "repeat itself, or a forward changes something that is not in its module. What "
                "is said of modules is from another training; the trials are without the probe."
            )

    def _properties(self) -> dict[str, str]:
        """The settings that the level had in its runs, as text."""
        for run in self._runs:
            if run.case == self._level and run.measured and run.measured.properties:
                return run.measured.properties
        level = properties_for(self._level.opt_level, self._level.dtype)
        return {name: str(value) for name, value in dataclasses.asdict(level).items()}

    def _ended(self, outcome: str, found: Found[Remedy], row: Row, findings: Findings) -> Answer:
        cured = outcome == CURED
        judged = row.comparisons[0] if row.comparisons else None
        answer = Answer(
            script=str(self._script),
            opt_level=self._level.opt_level,
            dtype=self._level.dtype or "",
            outcome=outcome,
            needed=[str(one) for one in found.needed],
            settings=remedies.settings(found.needed),
            overrides=remedies.overrides(found.needed, findings.paths),
            line=self._line(found.needed, findings.paths) if cured else "",
            settings_tried=self._settings,
            is_smallest=found.is_decided,
            candidates=found.trials,
            unseen=judged.smallest if judged else None,
            judged=judged.name if judged else "",
            failure="" if outcome in (PASSES, CURED) else reason(row),
            not_shown=_not_shown(row) if outcome in (PASSES, CURED) else "",
            modules=ranked(findings.modules),
            paths=list(findings.paths),
            uncalled=list(findings.uncalled),
        )
        self._write(answer)
        return answer

    def _line(self, needed: Sequence[Remedy], paths: Sequence[str]) -> str:
        return remedies.line(self._level, needed, paths, self._sweep.kind)

    def _timed(self, answer: Answer, cure: Case, level: Row) -> Answer:
        """The answer with the speed of the cure beside the level and O0, in rounds of their own.

        Steps of a level that has failed are no training, and are not timed.
        """
        place = self.directory / SPEED
        rows = [BASE, cure] if level.outcome == "failed" else [BASE, self._level, cure]
        self._say("Timing: " + ", ".join(case.label for case in rows))
        sweep = Sweep(
            self._script,
            self._arguments,
            rows=rows,
            rounds=self._rounds,
            out=place,
            resume=(place / "summary.json").exists(),
            **self._alone(),
        ).run()
        names = {BASE.label: "O0", self._level.label: "level", cure.label: "cure"}
        for row in sweep.rows:
            if row.step_ms is not None:
                answer.step_ms[names[row.label]] = row.step_ms
            if row.speed is not None:
                answer.speeds[names[row.label]] = row.speed
                answer.paces[names[row.label]] = in_words(row)
        self._write(answer)
        return answer

    def _alone(self) -> dict[str, Any]:
        """The options of the timing: its runs are whole ones that go on one at a time."""
        kept = {name: value for name, value in self._options.items() if name not in _OF_ACCURACY}
        asked = SweepOptions(**kept)
        if asked.devices:
            return {**kept, "devices": asked.devices[: asked.nproc_per_node or 1]}
        return {**kept, "jobs": 1}

    def _write(self, answer: Answer) -> None:
        write_json(self.directory / ANSWER, answer)
        if answer.outcome == CURED:
            write_json(self.directory / OVERRIDES, answer.overrides)
        else:
            (self.directory / OVERRIDES).unlink(missing_ok=True)


_OF_PROBE = frozenset(
    (
        *("module", "override_seeds", "timeout", "nproc_per_node"),
        *("engine", "devices", "address", "gpus_per_trial", "cpus_per_trial"),
    )
)
"""Options of a sweep that the probe's run shares."""
_OF_ACCURACY = frozenset(("seeds", "judge", "margin", "better", "jobs"))
"""Options that the timing of the cure does not share."""


def departure(plain: Measured, probed: Measured) -> int | None:
    """The first step at which a loss is another in the second run; None: there is none."""
    steps = []
    for name, series in plain.losses.items():
        losses = dict(zip(series.steps, series.values))
        other = probed.losses.get(name, Series())
        steps += [
            step
            for step, value in zip(other.steps, other.values)
            if step in losses and not math.isclose(value, losses[step], rel_tol=SAME)
        ]
    return min(steps, default=None)


def _not_shown(row: Row) -> str:
    return silent(row) or not_shown(row)


def read_answer(directory: str | Path) -> Answer | None:
    """The answer in a directory of `ampatch tune`; None if there is none."""
    data = read_json(Path(directory) / ANSWER)
    return None if data is None else restored(Answer, data)
