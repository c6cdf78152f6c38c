"""How much of a sweep fits its budget: the estimated times, and the best size of plan that fits.

A plan has a size: its seeds and its rounds of timing.  `wanted` is the size without a time limit,
`chosen` the one that fits the budget; `sizes` lists what is given up, in order.

Times are estimated from the first whole run of O0 and the measured speed of each half dtype, until
the row itself has run.  The size is chosen anew after each run, so a wrong estimate costs one run.
The records alone decide: a resumed sweep chooses the same.
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
from ampatch.sweep.report.numbers import counted
from ampatch.sweep.report.paired_test import MIN_TEST_SEEDS
from ampatch.sweep.report.run_figures import NO_STEP, OK, status, step_ms
from ampatch.sweep.trial import BASE, Case, Trial

DEFAULT_MINUTES = 10.0
DEFAULT_SEEDS = 5  # enough to show most differences of 1 %
FEWEST_ROUNDS = 2  # with fewer no speed can be told from O0's
SHORT_RUN_SECONDS = 3.0  # of training; a short run only measures time
MIN_SHORT_STEPS = 24  # in a short run; a quarter is the warm-up
MIN_TIMED_STEPS = 6  # if only O0 has a whole run: the first step has no time, the second warms up
_USABLE = 0.95  # share of the budget for runs; the rest passes between them
_THIRD_SEED_OVERRUN = 1.25  # after two seeds three are run within this factor of the budget
_SMALLEST_OVERRUN = 1.1  # a size that takes up to this factor of the smallest size always fits


def short_steps(runs: Iterable[Run]) -> int | None:
    """How many steps a short run takes, from the first good whole run of O0; None before it."""
    for run in runs:
        if run.case == BASE and not run.trial.short and status(run) == OK:
            ms = step_ms(run.measured)
            return max(MIN_SHORT_STEPS, math.ceil(SHORT_RUN_SECONDS * 1000 / ms) if ms else 0)
    return None


def is_due(trial: Trial, runs: Iterable[Run], fail_fast: bool = False) -> bool:
    """Whether a trial is to run, or failed runs have made it useless.

    A short run is useless after a failed run of its row or of O0.  A whole run is useless after a
    failed short run of its row, or a run without a step (with `fail_fast`: after any failed run).
    """
    cases = (trial.case, BASE) if trial.short else (trial.case,)
    failed = [run for run in runs if run.case in cases and status(run) != OK]
    any_failure = trial.short or fail_fast
    return not any(
        not run.trial.again and (any_failure or run.trial.short or status(run).startswith(NO_STEP))
        for run in failed
    )


@dataclass(frozen=True)
class PlanSize:
    """The seeds of each row and the rounds of timing.  With `seeds` 0 only O0 has a whole run.

    With `all_rows` False O3 is left out where two other rows run.  `again`: O0 runs twice in a
    round.
    """

    seeds: int
    rounds: int
    all_rows: bool = True
    again: bool = True

    def rows(self, rows: Sequence[Case]) -> Sequence[Case]:
        """Those of `rows` that run."""
        without_o3 = [row for row in rows if row.opt_level != "O3"]
        return rows if self.all_rows or len(without_o3) < 2 else without_o3

    def trials(
        self, rows: Sequence[Case], ended: Collection[Trial] = (), **others: Any
    ) -> list[Trial]:
        """The trials in order, without a second run of O0 in rounds that ended without it."""
        planned = trials(self.rows(rows), self.seeds, self.rounds, again=self.again, **others)
        last = max((trial.round for trial in ended if trial.case != BASE), default=(0, 0))
        has_none = last > (0, 0) and not any(trial.again for trial in ended)
        too_late = {
            trial
            for trial in planned
            if trial.again and not trial.repeat and (has_none or trial.round < last)
        }
        return [trial for trial in planned if trial in ended or trial not in too_late]

    def tests_accuracy(self, wanted: PlanSize) -> bool:
        """Whether it has the seeds that a verdict on accuracy needs."""
        return self.seeds >= min(wanted.seeds, MIN_TEST_SEEDS)


@dataclass(frozen=True)
class Timings:
    """The times of ended runs in seconds, and estimates for the others."""

    spent: float
    startup: float  # of the quickest process, without its training
    overhead: float  # of the quickest whole run, without its steps
    whole_steps: int  # optimizer steps of a whole run
    short_steps: int  # of a short run
    steps: Mapping[Case, float]  # a step of each row that has run
    whole_runs: Mapping[Case, float]  # a whole run of each row that has run
    half_speeds: Mapping[str, float]  # of each half dtype, relative to FP32
    failed: Sequence[Run]

    @classmethod
    def of(cls, runs: Sequence[Run], half_speeds: Mapping[str, float]) -> Timings | None:
        """None before a whole run of O0 has gone well."""
        bases = [
            run for run in runs if run.case == BASE and not run.trial.short and status(run) == OK
        ]
        if not bases:
            return None
        trained = [run for run in runs if run.steps]
        good = [run for run in runs if not run.trial.short and status(run) == OK]
        imports = bases[0].imports if len(trained) == 1 else 0.0  # later trials start warm
        return cls(
            spent=sum(run.seconds for run in runs),
            startup=min(map(_overhead, trained)) - imports,
            overhead=min(map(_overhead, good)) - imports,
            whole_steps=bases[0].steps,
            short_steps=short_steps(bases) or MIN_TIMED_STEPS,
            steps=_means((run.case, _step(run)) for run in trained if _step(run)),
            whole_runs=_means(
                (run.case, run.seconds)
                for run in runs
                if not run.trial.short and run is not bases[0]  # it started cold
            ),
            half_speeds=half_speeds,
            failed=[run for run in runs if status(run) != OK],
        )

    def step_seconds(self, case: Case) -> float:
        """A step of a row: its own, the slowest in the same dtype, or O0's by the dtype's speed."""
        same_dtype = [seconds for other, seconds in self.steps.items() if other.dtype == case.dtype]
        if same_dtype:
            return self.steps.get(case, max(same_dtype))
        dtypes = (case.dtype or "").split("+")
        speed = min(min(1.0, self.half_speeds.get(name, 1.0)) for name in dtypes)
        return self.steps.get(BASE, 0.0) / speed

    def trial_seconds(self, trial: Trial, few_steps: bool) -> float:
        """How long a trial will take."""
        if trial.short:
            steps = MIN_TIMED_STEPS if few_steps else min(self.short_steps, self.whole_steps)
            return self.startup + steps * self.step_seconds(trial.case)
        estimate = self.overhead + self.whole_steps * self.step_seconds(trial.case)
        return self.whole_runs.get(trial.case, estimate)

    def sweep_seconds(
        self, rows: Sequence[Case], size: PlanSize, ended: Collection[Trial]
    ) -> float:
        """How long the whole sweep will take, the runs that have ended included."""
        remaining = (trial for trial in size.trials(rows, ended) if trial not in ended)
        due = (trial for trial in remaining if is_due(trial, self.failed))
        return self.spent + sum(self.trial_seconds(trial, not size.seeds) for trial in due)

    def budget_minutes(self, rows: Sequence[Case], size: PlanSize, ended: Collection[Trial]) -> int:
        """The smallest budget that this size fits, in whole minutes."""
        return math.ceil(self.sweep_seconds(rows, size, ended) / 60 / _USABLE)


def sizes(wanted: PlanSize) -> Iterator[PlanSize]:
    """The sizes to choose from, the best first.

    What they give up, in this order: seeds beyond `MIN_TEST_SEEDS`, rounds of timing, O3, the second run of
    O0 in each round, and seeds that a test of accuracy needs.  Each seed is a round of timing too.
    """
    enough, least = min(wanted.seeds, MIN_TEST_SEEDS), min(wanted.rounds, FEWEST_ROUNDS)
    for n in range(wanted.seeds, enough - 1, -1):
        yield PlanSize(n, wanted.rounds)
    few = min(wanted.rounds, max(enough, least))
    yield PlanSize(enough, few)
    yield PlanSize(enough, few, all_rows=False)
    if few >= MIN_TEST_SEEDS:
        yield PlanSize(enough, few, all_rows=False, again=False)
    yield PlanSize(min(enough, 2), min(wanted.rounds, max(2, least)), all_rows=False)
    for n in (1, 0):
        yield PlanSize(n, wanted.rounds)
        for rounds in range(wanted.rounds, least - 1, -1):
            yield PlanSize(n, rounds, all_rows=False)


def choose_size(
    rows: Sequence[Case], wanted: PlanSize, minutes: float, timings: Timings,
    ended: Collection[Trial],
) -> PlanSize:  # fmt: skip
    """The best size that fits `minutes`, or takes hardly longer than the smallest size.

    If a row other than O0 has begun a second or later seed, all rows run that seed, because half a
    round compares nothing.  Two seeds are too few for a test.  So a third one follows, even if the
    sweep then takes up to a quarter longer than the budget.
    """
    whole = (trial for trial in ended if not trial.short and trial.case != BASE)
    begun = max((trial.seed + 1 for trial in whole), default=0)
    least = begun if begun > 1 else 0
    possible = (dataclasses.replace(size, seeds=max(size.seeds, least)) for size in sizes(wanted))
    times = {size: timings.sweep_seconds(rows, size, ended) for size in possible}
    limit = max(_USABLE * 60 * minutes, _SMALLEST_OVERRUN * min(times.values()))
    chosen = next(size for size, seconds in times.items() if seconds <= limit)
    if least > 1 and not chosen.tests_accuracy(wanted):
        smallest_tested = [size for size in times if size.tests_accuracy(wanted)][-1]
        if times[smallest_tested] <= _THIRD_SEED_OVERRUN * 60 * minutes:
            return smallest_tested
    return chosen


def size_note(rows: Sequence[Case], chosen: PlanSize, minutes: float | None, seconds: float) -> str:
    """What is planned, and how long it takes."""
    limit = "" if minutes is None else f" for --budget {minutes:g}"
    seeds = counted(max(1, chosen.seeds), "seed")
    names = ", ".join(dict.fromkeys(row.level_name for row in chosen.rows(rows)))
    rounds = f" and {counted(chosen.rounds, 'round')} of timing"  # each seed is one, too
    note = f"Planned{limit}: {seeds}{rounds if chosen.rounds > chosen.seeds else ''} of {names}"
    if not chosen.seeds:
        note += f", in which all but O0 take {MIN_TIMED_STEPS} steps"
    note += f"; about {duration(seconds)} in all."
    if minutes is not None and seconds > 60 * minutes:
        note += " It takes longer than its budget: a smaller plan would tell nothing."
    return note


def omission_note(
    wanted: PlanSize, chosen: PlanSize, has_o3: bool, has_again: bool, to_test: int, for_all: int
) -> str:
    """What a budget leaves out, and the budget that suffices for it; "" for nothing.

    `to_test` are the minutes that a test of accuracy takes, `for_all` those of all that is wanted.
    """
    if not chosen.tests_accuracy(wanted):
        return (
            f"{counted(max(1, chosen.seeds), 'seed')} can show how fast the rows are; to compare "
            f"their accuracy takes {MIN_TEST_SEEDS}: --resume --budget {to_test} does both."
        )
    missing = {
        "O3": not has_o3,
        "a second timing of O0": not has_again,
        counted(wanted.seeds - chosen.seeds, "more seed"): wanted.seeds > chosen.seeds,
        "rounds of timing": wanted.rounds > max(chosen.rounds, chosen.seeds),
    }
    names = ", ".join(name for name, is_missing in missing.items() if is_missing)
    return f"Left out: {names}. --resume --budget {for_all} has all." if names else ""


def duration(seconds: float) -> str:
    """`0:03:20`."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _step(run: Run) -> float:
    """Seconds of a step; 0 where none was timed."""
    return (step_ms(run.measured) or 0.0) / 1000


def _overhead(run: Run) -> float:
    return max(0.0, run.seconds - run.steps * _step(run))


def _means(pairs: Iterable[tuple[Case, float]]) -> dict[Case, float]:
    values: dict[Case, list[float]] = {}
    for case, value in pairs:
        values.setdefault(case, []).append(value)
    return {case: statistics.mean(of_case) for case, of_case in values.items()}
