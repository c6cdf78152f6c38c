"""Estimates how long the trials of a sweep take, and chooses the size of plan that fits the budget.

The size of a plan is its number of seeds and of timing rounds.  `wanted` is the size without a time
limit, and `chosen` is the size that fits the budget.  `sizes` lists what is given up, in order.

Before a row has run, its times are estimated from the first full run of O0 and the measured speed
of each half dtype.  A wrong estimate costs one run, because the size is chosen again after each
run.  A resumed sweep makes the same choice, because only ended runs count.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampatch.sweep.cases_and_trials import trials
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.report.paired_test import MIN_TEST_SEEDS
from ampatch.sweep.report.run_figures import NO_STEP, OK, status, step_ms
from ampatch.sweep.trial import BASE, Case, Trial

DEFAULT_MINUTES = 10.0
DEFAULT_SEEDS = 5  # enough to show most differences of 1 %
MIN_ROUNDS = 2  # one round cannot tell a speed from O0's
SHORT_RUN_SECONDS = 3.0  # seconds of training in a short run, which only measures time
MIN_SHORT_STEPS = 24  # steps of a short run; a quarter of them is the warm-up
MIN_TIMED_STEPS = 6  # steps of a short run if only O0 has a full run; two are not timed
_USABLE_FRACTION = 0.95  # fraction of the budget that runs may fill; the rest is time between runs
_THIRD_SEED_OVERRUN = 1.25  # a third seed may take the sweep to this factor of its budget
_SHORTEST_OVERRUN = 1.1  # a size may take this factor of the shortest size's time


def short_steps(runs: Iterable[Run]) -> int | None:
    """Steps of a short run, from the first good full run of O0; None before there is one."""
    for run in runs:
        if run.case == BASE and not run.trial.short and status(run) == OK:
            ms = step_ms(run.measured)
            return max(MIN_SHORT_STEPS, math.ceil(SHORT_RUN_SECONDS * 1000 / ms) if ms else 0)
    return None


def is_due(trial: Trial, runs: Iterable[Run], fail_fast: bool = False) -> bool:
    """Whether a trial should run; False if failed runs have made it useless.

    A short run is useless after a failed run of its row or of O0.  A full run is useless after a
    failed short run of its row, or a run without a step (with `fail_fast`: after any failed run).
    """
    cases = (trial.case, BASE) if trial.short else (trial.case,)
    failed = [run for run in runs if run.case in cases and status(run) != OK]
    any_failure_counts = trial.short or fail_fast
    return not any(
        not run.trial.again
        and (any_failure_counts or run.trial.short or status(run).startswith(NO_STEP))
        for run in failed
    )


@dataclass(frozen=True)
class PlanSize:
    """The number of seeds of each row, and of rounds of timing.

    With `seeds=0` only O0 has a full run.  With `all_rows=False`, O3 is left out if at least two
    other rows remain.  With `again` O0 runs twice in a round.
    """

    seeds: int
    rounds: int
    all_rows: bool = True
    again: bool = True

    def included(self, cases: Sequence[Case]) -> Sequence[Case]:
        """The cases that run."""
        without_o3 = [case for case in cases if case.opt_level != "O3"]
        return cases if self.all_rows or len(without_o3) < 2 else without_o3

    def trials(
        self, cases: Sequence[Case], ended: Collection[Trial] = (), **options: Any
    ) -> list[Trial]:
        """The trials in order, with the `options` of `cases_and_trials.trials`.

        A round of full runs that has ended without a second run of O0 does not get one later.
        """
        planned = trials(self.included(cases), self.seeds, self.rounds, again=self.again, **options)
        last_round = max((trial.round for trial in ended if trial.case != BASE), default=(0, 0))
        lacks_second_base_runs = last_round > (0, 0) and not any(trial.again for trial in ended)
        missed_second_runs = {
            trial
            for trial in planned
            if trial.again
            and not trial.repeat
            and (lacks_second_base_runs or trial.round < last_round)
        }
        return [trial for trial in planned if trial in ended or trial not in missed_second_runs]

    def tests_accuracy(self, wanted: PlanSize) -> bool:
        """Whether the seeds are enough to test accuracy."""
        return self.seeds >= min(wanted.seeds, MIN_TEST_SEEDS)


@dataclass(frozen=True)
class Timings:
    """The times of ended runs in seconds, and estimates for the others."""

    spent: float  # seconds of all ended runs
    short_run_overhead: float  # seconds outside of the steps, the minimum over all runs
    full_run_overhead: float  # the same, the minimum over full runs
    full_run_steps: int  # optimizer steps of a full run
    short_run_steps: int  # optimizer steps of a short run
    mean_step_seconds: Mapping[Case, float]  # by row
    full_run_seconds: Mapping[Case, float]  # mean, by row
    half_speeds: Mapping[str, float]  # speed of each half dtype, relative to FP32
    failed: Sequence[Run]

    @classmethod
    def of(cls, runs: Sequence[Run], half_speeds: Mapping[str, float]) -> Timings | None:
        """The timings of these runs; None before a full run of O0 has succeeded."""
        full_runs = [run for run in runs if not run.trial.short]
        good = [run for run in full_runs if status(run) == OK]
        bases = [run for run in good if run.case == BASE]
        if not bases:
            return None
        trained = [run for run in runs if run.steps]
        # Only the first run is sure to start cold; forked trials take no time for imports.
        imports = bases[0].imports if len(trained) == 1 else 0.0
        return cls(
            spent=sum(run.seconds for run in runs),
            short_run_overhead=min(map(_overhead, trained)) - imports,
            full_run_overhead=min(map(_overhead, good)) - imports,
            full_run_steps=bases[0].steps, short_run_steps=short_steps(bases) or MIN_TIMED_STEPS,
            mean_step_seconds=_means((run.case, _step(run)) for run in trained if _step(run)),
            full_run_seconds=_means((r.case, r.seconds) for r in full_runs if r is not bases[0]),
            half_speeds=half_speeds, failed=[run for run in runs if status(run) != OK],
        )  # fmt: skip

    def step_seconds(self, case: Case) -> float:
        """Seconds of a step of this row.

        Before the row has run: those of the dtype's slowest row, or O0's over the dtype's speed.
        """
        measured = self.mean_step_seconds
        same_dtype = [seconds for other, seconds in measured.items() if other.dtype == case.dtype]
        if same_dtype:
            return measured.get(case, max(same_dtype))
        dtypes = (case.dtype or "").split("+")
        speed = min(min(1.0, self.half_speeds.get(name, 1.0)) for name in dtypes)
        return measured.get(BASE, 0.0) / speed

    def trial_seconds(self, trial: Trial, few_steps: bool) -> float:
        """How long a trial will take; with `few_steps` a short run has `MIN_TIMED_STEPS`."""
        seconds = self.step_seconds(trial.case)
        if trial.short:
            steps = min(self.short_run_steps, self.full_run_steps)
            return self.short_run_overhead + seconds * (MIN_TIMED_STEPS if few_steps else steps)
        estimate = self.full_run_overhead + seconds * self.full_run_steps
        return self.full_run_seconds.get(trial.case, estimate)

    def sweep_seconds(
        self, cases: Sequence[Case], size: PlanSize, ended: Collection[Trial]
    ) -> float:
        """How long the whole sweep will take, including the runs that have ended."""
        remaining = (trial for trial in size.trials(cases, ended) if trial not in ended)
        due = (trial for trial in remaining if is_due(trial, self.failed))
        return self.spent + sum(self.trial_seconds(trial, not size.seeds) for trial in due)

    def minutes_for(self, cases: Sequence[Case], size: PlanSize, ended: Collection[Trial]) -> int:
        """The smallest budget that this size fits, in whole minutes."""
        return math.ceil(self.sweep_seconds(cases, size, ended) / 60 / _USABLE_FRACTION)


def sizes(wanted: PlanSize) -> Iterator[PlanSize]:
    """The sizes to choose from, the best first.

    Later sizes give up, in this order: seeds beyond `MIN_TEST_SEEDS`, rounds of timing, O3, the
    second run of O0 in a round, seeds for a test of accuracy.  Each seed is a round of timing.
    """
    test_seeds = min(wanted.seeds, MIN_TEST_SEEDS)  # enough to test accuracy
    min_rounds = min(wanted.rounds, MIN_ROUNDS)
    for seeds in range(wanted.seeds, test_seeds - 1, -1):
        yield PlanSize(seeds, wanted.rounds)
    test_rounds = min(wanted.rounds, max(test_seeds, min_rounds))
    yield PlanSize(test_seeds, test_rounds)
    yield PlanSize(test_seeds, test_rounds, all_rows=False)
    if test_rounds >= MIN_TEST_SEEDS:
        yield PlanSize(test_seeds, test_rounds, all_rows=False, again=False)
    yield PlanSize(min(test_seeds, 2), min(wanted.rounds, max(2, min_rounds)), all_rows=False)
    for seeds in (1, 0):
        yield PlanSize(seeds, wanted.rounds)
        for rounds in range(wanted.rounds, min_rounds - 1, -1):
            yield PlanSize(seeds, rounds, all_rows=False)


def choose_size(
    cases: Sequence[Case], wanted: PlanSize, minutes: float, timings: Timings,
    ended: Collection[Trial],
) -> PlanSize:  # fmt: skip
    """The best size that fits `minutes`, or takes at most `_SHORTEST_OVERRUN` times the shortest.

    Once a row other than O0 has run with a second or later seed, every row runs with that seed,
    because an incomplete round cannot be compared.  Two seeds are too few for a test, so a third
    follows if the sweep then takes at most `_THIRD_SEED_OVERRUN` times its budget.
    """
    full = (trial for trial in ended if not trial.short and trial.case != BASE)
    begun_seeds = max((trial.seed + 1 for trial in full), default=0)
    min_seeds = begun_seeds if begun_seeds > 1 else 0
    possible = (
        dataclasses.replace(size, seeds=max(size.seeds, min_seeds)) for size in sizes(wanted)
    )
    times = {size: timings.sweep_seconds(cases, size, ended) for size in possible}
    limit = max(_USABLE_FRACTION * 60 * minutes, _SHORTEST_OVERRUN * min(times.values()))
    chosen = next(size for size, seconds in times.items() if seconds <= limit)
    if min_seeds and not chosen.tests_accuracy(wanted):
        smallest_to_test = [size for size in times if size.tests_accuracy(wanted)][-1]
        if times[smallest_to_test] <= _THIRD_SEED_OVERRUN * 60 * minutes:
            return smallest_to_test
    return chosen


def duration_text(seconds: float) -> str:
    """`0:03:20`."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _step(run: Run) -> float:
    """Seconds of a step; 0 if none was timed."""
    return (step_ms(run.measured) or 0.0) / 1000


def _overhead(run: Run) -> float:
    return max(0.0, run.seconds - run.steps * _step(run))


def _means(pairs: Iterable[tuple[Case, float]]) -> dict[Case, float]:
    by_case: dict[Case, list[float]] = {}
    for case, value in pairs:
        by_case.setdefault(case, []).append(value)
    return {case: statistics.mean(values) for case, values in by_case.items()}
