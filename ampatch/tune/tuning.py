"""Runs `ampatch tune`: tests the level as it is, probes the modules, searches, times the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampatch.config.validation import whole_number
from ampatch.launch.program import Program
from ampatch.sweep.execution.directory import delete_sweep_files, results_in
from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.options import ROUNDS, SweepOptions, resumed_options
from ampatch.sweep.report import pace
from ampatch.sweep.report.recommendation import missing_evidence
from ampatch.sweep.report.results import SUMMARY, Row, read_results
from ampatch.sweep.trial import BASE, Case
from ampatch.tune import remedies
from ampatch.tune.answer import (
    CURED,
    NO_CURE,
    PASSES,
    UNDECIDED,
    Answer,
    write_answer,
)
from ampatch.tune.candidate_sweep import CandidateSweep, TuneTask
from ampatch.tune.probe_run import PROBE, probe_or_read
from ampatch.tune.remedies import Remedy
from ampatch.tune.search import SearchResult, max_trials, smallest_passing_set
from ampatch.tune.sensitivity import Findings, ranked
from ampatch.tune.verdict import failure_reason, passes

DTYPE, PROBE_STEPS = "float16", 100
SEEDS = 6  # the answer is tested with all of them, candidates with half of them
MIN_SEEDS = 4  # because the search uses half of them, and a test needs two
SPEED = "speed"  # the directory of the sweep that times the answer
_NOT_FOR_SPEED = frozenset(("seeds", "judge", "margin", "better", "jobs", "devices"))


class Tuning:
    """The trials that find the smallest set of modules in FP32 with which a level trains as O0.

    Args:
        script: the script's file, or with `module` in `options` the name of a module.
        arguments: arguments of the script, as for `Sweep`.
        opt_level: "O1", "O2" or "O3"; with `resume` it may be left out.
        dtype: "float16" (the default) or "bfloat16".
        probe_steps: optimizer steps of the probe, an O0 run that also computes the modules in
            half; by default 100.
        rounds: how often the answer, the level and O0 are timed, by default 3.
        candidates: the largest number of sets to try; by default about 2 log2(n) for n modules.
        out: the directory, by default `ampatch-tune/` and the script's name.
        options: further options of `Sweep`: seeds (6 by default), metrics, judge, margin, better,
            timeout, engines, `resume` and `overwrite`.

    With `resume`, options and arguments that are left out keep the values they had.
    Raises what `Sweep` raises.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        opt_level: str | None = None,
        dtype: str | None = None,
        probe_steps: int | None = None,
        candidates: int | None = None,
        rounds: int | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        progress: Callable[[], Progress | None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        tune_options = {"opt_level": opt_level, "dtype": dtype, "probe_steps": probe_steps}
        tune_options |= {"candidates": candidates, "rounds": rounds}
        options["tuning"] = {
            name: value for name, value in tune_options.items() if value is not None
        }
        sweep_options = SweepOptions(**options, out=out, resume=resume, overwrite=overwrite)
        program = Program(str(script), options.get("module", False))
        self.directory = Path("ampatch-tune") / program.title if out is None else Path(out)
        earlier = read_results(self.directory) if resume else None
        if earlier is not None:
            recorded = sweep_options.to_record(options)
            note, kept, _ = resumed_options(
                earlier, options, recorded, arguments, not_kept=("rounds",)
            )
            options, arguments = {**options, **kept}, arguments or earlier.arguments
            self._check_level(earlier.options.get("tuning", {}), options["tuning"])
            if note:
                say(note)
        seeds = options.setdefault("seeds", SEEDS)
        whole_number(f"--seeds {seeds}", seeds, least=MIN_SEEDS)
        tune_options = options["tuning"]
        if "opt_level" not in tune_options:
            hint = f" {self.directory} holds no tuning to resume." if resume else ""
            raise ValueError(f"--opt-level: expected O1, O2 or O3, the level to repair.{hint}")
        self._level = Case(tune_options["opt_level"], tune_options.get("dtype", DTYPE))
        self._task = TuneTask(
            script, arguments, self._level, options, self.directory, progress, say
        )
        self._probe_steps: int = tune_options.get("probe_steps", PROBE_STEPS)
        self._max_candidates: int | None = tune_options.get("candidates")
        self._rounds: int = tune_options.get("rounds", ROUNDS)
        self._confirms_candidates = False  # whether every candidate that passes runs with all seeds
        self._paths: Sequence[str] = ()  # the paths of all modules of the models
        self._candidates_tried = 0
        self._resumes = resume
        self._sweep = self._open_sweep(seeds, resume, overwrite)

    def run(self) -> Answer:
        """Run the remaining trials, write the answer to its files, and return it.

        Raises `SweepError` or `TuneError` if there is no answer.
        """
        row = self._sweep.confirm(self._level, self._level.label)
        if passes(row):
            return self._finish(PASSES, SearchResult((), True, True, 0), row, Findings(), {})
        # A level that ran with all seeds had passed with the search's seeds, so these are too few.
        self._confirms_candidates = self._level in self._sweep.with_all_seeds
        self._task.say(f"{self._level.label} fails: {failure_reason(row)}")
        probed = probe_or_read(self._task, self._sweep, self._probe_steps)
        self._paths = probed.paths
        possible = remedies.possible_remedies(probed, self._sweep.properties(), self._task.dtype)
        limit = max_trials(len(possible)) if self._max_candidates is None else self._max_candidates
        settings_tried = remedies.settings(possible)
        search = self._search(possible, limit)
        if not search.passes:
            outcome = NO_CURE if search.is_decided else UNDECIDED
            return self._finish(outcome, search, row, probed, settings_tried)
        cured_case = self._case(search.needed)
        cured_row = self._sweep.run_case(cured_case)
        answer = self._finish(CURED, search, cured_row, probed, settings_tried)
        self._add_speeds(answer, cured_case, row.outcome != "failed")
        return answer

    def _search(self, possible: Sequence[Remedy], limit: int) -> SearchResult[Remedy]:
        """Search for the smallest set that passes, and confirm it with all seeds.

        If the set fails with all seeds, few seeds are not enough for this script.  Then the search
        is repeated, and each candidate that passes is confirmed.
        """
        few = self._sweep.search_seeds
        confirmed = "Candidates that pass run" if self._confirms_candidates else "The answer runs"
        self._task.say(
            f"{len(possible)} modules and settings to try, in at most {limit} candidates. "
            f"Candidates run with {few} seeds. {confirmed} with all {self._sweep.seeds}."
        )
        self._candidates_tried = 0
        search = smallest_passing_set(possible, self._candidate_passes, limit)
        if not search.passes or self._confirms_candidates:
            return search
        row = self._sweep.confirm(self._case(search.needed), "The answer")
        if passes(row):
            return search
        self._task.say(
            f"The answer fails: {failure_reason(row)}. {few} seeds are too few here. The search is "
            "repeated; earlier runs are used again."
        )
        self._confirms_candidates = True
        return self._search(possible, limit)

    def _case(self, chosen: Iterable[Remedy]) -> Case:
        return remedies.case(self._level, chosen, self._paths)

    def _candidate_passes(self, chosen: frozenset[Remedy]) -> bool:
        more = f" and {len(chosen) - 4} more" if len(chosen) > 4 else ""
        names = ", ".join(sorted(map(str, chosen))[:4]) + more
        self._candidates_tried += 1
        label = f"Candidate {self._candidates_tried} ({names})"
        self._task.say(f"{label}: started")
        case = self._case(chosen)
        row = (
            self._sweep.confirm(case, label)
            if self._confirms_candidates
            else self._sweep.run_case(case)
        )
        passed = passes(row)
        self._task.say(f"{label}: {'passes' if passed else f'fails: {failure_reason(row)}'}")
        return passed

    def _check_level(self, earlier: Mapping[str, Any], tune_options: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a tuning of another level or half dtype, or for a sweep."""
        existing, requested = (
            options and f"tuning of {options['opt_level']} in {options.get('dtype', DTYPE)}"
            for options in (earlier, tune_options)
        )
        if existing != requested:
            raise ValueError(
                f"{self.directory}: holds a {existing or 'sweep'}. For a {requested}, replace it "
                "with --overwrite, or choose another directory with --out."
            )

    def _open_sweep(self, seeds: int, resume: bool, overwrite: bool) -> CandidateSweep:
        """Open the sweep in the directory; with `overwrite` delete earlier probes and timings."""
        for name in (PROBE, SPEED):
            results_in(self.directory / name)  # raises for a folder of other files
        sweep = CandidateSweep(self._task, seeds, resume, overwrite)
        if overwrite:
            for name in (PROBE, SPEED):
                delete_sweep_files(self.directory / name)
        return sweep

    def _add_speeds(self, answer: Answer, cured_case: Case, level_trains: bool) -> None:
        """Time the cured case beside O0 and, if `level_trains`, beside the level itself."""
        task, directory = self._task, self.directory / SPEED
        rows = [BASE, self._level, cured_case] if level_trains else [BASE, cured_case]
        task.say("Timing: " + ", ".join(case.label for case in rows))
        devices = SweepOptions(devices=task.options.get("devices") or ()).devices
        group = devices[: task.options.get("nproc_per_node") or 1]
        resume = self._resumes and (directory / SUMMARY).exists()
        sweep = task.sweep(
            rows,
            directory,
            task.options.keys() - _NOT_FOR_SPEED,
            rounds=self._rounds,
            resume=resume,
            overwrite=not resume,
            **({"devices": group} if group else {"jobs": 1}),
        ).run()
        names = {BASE.label: "O0", self._level.label: "level", cured_case.label: "cure"}
        for row in sweep.rows:
            if row.speed is not None:
                answer.speeds[names[row.label]] = row.speed
                answer.paces[names[row.label]] = pace.speed_text(row)
        write_answer(self.directory, answer)

    def _finish(
        self,
        outcome: str,
        search: SearchResult[Remedy],
        row: Row,
        probed: Findings,
        settings_tried: dict[str, Any],
    ) -> Answer:
        judged = row.comparisons[0] if row.comparisons else None
        missing = missing_evidence(row) if outcome in (PASSES, CURED) else None
        not_shown = f"{missing.text}." if missing else ""
        if missing and missing.options:
            not_shown += f" --resume {missing.options} shows it."
        answer = Answer(
            script=str(self._task.script),
            opt_level=self._level.opt_level,
            dtype=self._task.dtype,
            outcome=UNDECIDED if not_shown else outcome,
            needed=[str(remedy) for remedy in search.needed],
            settings=remedies.settings(search.needed),
            overrides=remedies.overrides(search.needed, probed.paths),
            line=remedies.line(self._level, search.needed, probed.paths, self._sweep.kind)
            if outcome == CURED
            else "",
            settings_tried=settings_tried,
            is_smallest=search.is_decided,
            candidates=search.trials,
            unseen=judged.smallest if judged else None,
            judged=judged.name if judged else "",
            failure="" if outcome in (PASSES, CURED) else failure_reason(row),
            not_shown=not_shown,
            modules=ranked(probed.modules),
        )
        write_answer(self.directory, answer)
        return answer
