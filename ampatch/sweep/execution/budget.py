"""How much of a sweep fits its budget: what trials will take, and the largest plan that fits.

The first whole run of O0 says how long a process, a step and a run take.  Another row is taken to
need O0's time, longer by the measured speed of its half dtype, until runs in it have shown theirs.
With each run that ends the plan is made anew, so a wrong guess costs one run.  All of it follows
from the records: a resumed sweep comes to the same plan.
`plans` has what is given up, in its order.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampatch.sweep.measure.record import Run
from ampatch.sweep.plan import trials
from ampatch.sweep.report.figures import NO_STEP, OK, status, step_ms
from ampatch.sweep.report.numbers import counted
from ampatch.sweep.report.paired import TESTED
from ampatch.sweep.trial import BASE, Case, Trial

DEFAULT_MINUTES = 10.0
SEEDS = 5  # are planned where the user names no number; five seeds show most differences of 1 %
FEWEST_ROUNDS = 2  # from which a speed can be told apart
SECONDS = 3.0  # training in a short run, which is there for its timing
LEAST_STEPS = 24  # in a short run; a quarter is the warm-up
FEWEST_STEPS = 6  # where only O0 has a whole run: one without a time, one to warm up, and four
_USABLE = 0.95  # share of the budget; the rest is between the runs
_LITTLE_MORE = 1.25  # budgets, for the third seed once the second has begun
_HARDLY = 1.1  # times the smallest plan: where processes start slowly, whole runs cost no more


def short_steps(runs: Iterable[Run]) -> int | None:
    """After how many steps short runs end, by the first whole run of O0 that went well, if any."""
    for run in runs:
        if run.case == BASE and not run.trial.short and status(run) == OK:
            ms = step_ms(run.measured)
            return max(LEAST_STEPS, math.ceil(SECONDS * 1000 / ms)) if ms else LEAST_STEPS
    return None


def is_due(trial: Trial, runs: Iterable[Run], fail_fast: bool = False) -> bool:
    """Whether a trial is worth its time.

    A short run is not, after a failed run of its row or of O0.  A whole run is not, after a failed
    short run of its row, or one without a step (with `fail_fast`: after any failed run of it).
    """
    needed = (trial.case, BASE) if trial.short else (trial.case,)
    failed = [run for run in runs if run.case in needed and status(run) != OK]
    at_once = trial.short or fail_fast
    return not any(
        not run.trial.again and (at_once or run.trial.short or status(run).startswith(NO_STEP))
        for run in failed
    )


@dataclass(frozen=True)
class Amounts:
    """How many seeds each row has, and the rounds of timing; with `seeds` 0 only O0 has one.

    `all_rows`: O3 too, where others may be recommended before it.  `again`: O0 twice in a round.
    """

    seeds: int
    rounds: int
    all_rows: bool = True
    again: bool = True

    def rows(self, rows: Sequence[Case]) -> Sequence[Case]:
        """Those that run, of all `rows`."""
        first = [row for row in rows if row.opt_level != "O3"]
        return rows if self.all_rows or len(first) < 2 else first

    def trials(
        self, rows: Sequence[Case], begun: Collection[Trial] = (), **others: Any
    ) -> list[Trial]:
        """The trials in their order, without a second O0 in seeds of which one is over without."""
        every = trials(self.rows(rows), self.seeds, self.rounds, again=self.again, **others)
        last = max((trial.round for trial in begun if trial.case != BASE), default=(0, 0))
        is_over = last > (0, 0) and not any(trial.again for trial in begun)
        late = {t for t in every if t.again and not t.repeat and (is_over or t.round < last)}
        return [trial for trial in every if trial in begun or trial not in late]

    def answers_all(self, wish: Amounts) -> bool:
        """Whether it has the seeds that a verdict on accuracy takes."""
        return self.seeds >= min(wish.seeds, TESTED)


@dataclass(frozen=True)
class Facts:
    """Times of ended runs, in seconds, from which those of other runs are estimated."""

    spent: float
    start: float  # a process without its training
    beside: float  # a whole run without its steps, the quickest
    steps: int  # in a whole run
    short: int  # steps of a timed run
    step: Mapping[Case, float]  # for rows that have run
    whole: Mapping[Case, float]  # a whole run of these
    lowest: Mapping[str, float]  # speed of each half dtype relative to FP32
    failed: Sequence[Run]  # others of their rows may not be due

    @classmethod
    def of(cls, runs: Sequence[Run], lowest: Mapping[str, float]) -> Facts | None:
        """None before a whole run of O0 has gone well."""
        bases = [
            run for run in runs if run.case == BASE and not run.trial.short and status(run) == OK
        ]
        if not bases:
            return None
        trained = [run for run in runs if run.steps]
        good = [run for run in runs if not run.trial.short and status(run) == OK]
        imports = bases[0].imports if len(trained) == 1 else 0.0  # the next ones have them
        return cls(
            spent=sum(run.seconds for run in runs),
            start=min(map(_beside_steps, trained)) - imports,
            beside=min(map(_beside_steps, good)) - imports,
            steps=bases[0].steps,
            short=short_steps(bases) or FEWEST_STEPS,
            step=_means((run.case, _step(run)) for run in trained if _step(run)),
            whole=_means(
                (run.case, run.seconds)
                for run in runs
                if not run.trial.short and run is not bases[0]  # it started cold
            ),
            lowest=lowest,
            failed=[run for run in runs if status(run) != OK],
        )

    def of_step(self, case: Case) -> float:
        """A step of a row: as measured, of it or of others in its type; or O0's by that's speed."""
        if case in self.step:
            return self.step[case]
        alike = [seconds for other, seconds in self.step.items() if other.dtype == case.dtype]
        if alike:
            return max(alike)
        halves = [min(1.0, self.lowest.get(name, 1.0)) for name in (case.dtype or "").split("+")]
        return self.step.get(BASE, 0.0) / min(halves)

    def of_trial(self, trial: Trial, few_steps: bool) -> float:
        """What a trial will take."""
        if trial.short:
            steps = FEWEST_STEPS if few_steps else min(self.short, self.steps)
            return self.start + steps * self.of_step(trial.case)
        guess = self.beside + self.steps * self.of_step(trial.case)
        return self.whole.get(trial.case, guess)

    def of_plan(self, rows: Sequence[Case], plan: Amounts, begun: Collection[Trial]) -> float:
        """What the whole sweep will have taken, with what has run already."""
        left = (trial for trial in plan.trials(rows, begun) if trial not in begun)
        due = (trial for trial in left if is_due(trial, self.failed))
        return self.spent + sum(self.of_trial(trial, not plan.seeds) for trial in due)

    def minutes(self, rows: Sequence[Case], plan: Amounts, begun: Collection[Trial]) -> int:
        """The budget that a plan fits."""
        return math.ceil(self.of_plan(rows, plan, begun) / 60 / _USABLE)


def plans(wish: Amounts) -> Iterator[Amounts]:
    """The plans to choose from, the best first.

    An answer takes `TESTED` seeds of the rows that may be recommended; they are rounds of the speed
    as well.  They come before more rounds, before O3, and before the second O0 of each round.
    """
    enough, least = min(wish.seeds, TESTED), min(wish.rounds, FEWEST_ROUNDS)
    for n in range(wish.seeds, enough - 1, -1):
        yield Amounts(n, wish.rounds)
    few = min(wish.rounds, max(enough, least))
    yield Amounts(enough, few)
    yield Amounts(enough, few, all_rows=False)
    if few >= TESTED:
        yield Amounts(enough, few, all_rows=False, again=False)
    yield Amounts(min(enough, 2), min(wish.rounds, max(2, least)), all_rows=False)
    for n in (1, 0):
        yield Amounts(n, wish.rounds)
        for rounds in range(wish.rounds, least - 1, -1):
            yield Amounts(n, rounds, all_rows=False)


def fitting(
    rows: Sequence[Case], wish: Amounts, minutes: float, facts: Facts, begun: Collection[Trial]
) -> Amounts:
    """The best plan that takes no more than `minutes`, or hardly more than the smallest.

    A seed after the first that a row beside O0 has begun is run by all rows: half a round compares
    nothing.  The third follows on the second where it takes a quarter more than the budget at most:
    it would be there for nothing.
    """
    whole = (trial for trial in begun if not trial.short and trial.case != BASE)
    started = max((trial.seed + 1 for trial in whole), default=0)
    least = started if started > 1 else 0
    possible = (dataclasses.replace(plan, seeds=max(plan.seeds, least)) for plan in plans(wish))
    times = {plan: facts.of_plan(rows, plan, begun) for plan in possible}
    limit = max(_USABLE * 60 * minutes, _HARDLY * min(times.values()))
    fit = next(plan for plan, seconds in times.items() if seconds <= limit)
    if least > 1 and not fit.answers_all(wish):
        with_answer = [plan for plan in times if plan.answers_all(wish)]
        if times[with_answer[-1]] <= _LITTLE_MORE * 60 * minutes:
            return with_answer[-1]
    return fit


def in_words(rows: Sequence[Case], plan: Amounts, minutes: float | None, seconds: float) -> str:
    """What is planned, how long it takes, and what of it can be known then."""
    limit = "" if minutes is None else f" for --budget {minutes:g}"
    seeds = counted(max(1, plan.seeds), "seed")
    names = ", ".join(dict.fromkeys(row.level_name for row in plan.rows(rows)))
    rounds = f" and {counted(plan.rounds, 'round')} of timing"  # each seed is one, too
    said = f"Planned{limit}: {seeds}{rounds if plan.rounds > plan.seeds else ''} of {names}"
    if not plan.seeds:
        said += f", in which all but O0 take {FEWEST_STEPS} steps"
    said += f"; about {duration(seconds)} in all."
    if minutes is not None and seconds > 60 * minutes:
        said += " It takes longer than its budget: a smaller plan would tell nothing."
    return said


def left_out(
    wish: Amounts, plan: Amounts, has_o3: bool, has_again: bool, to_answer: int, to_have_all: int
) -> str:
    """What a budget has left out, and the budgets that have it; "" for nothing."""
    if not plan.answers_all(wish):
        return (
            f"{counted(max(1, plan.seeds), 'seed')} can show how fast the rows are; to compare "
            f"their accuracy takes {TESTED}: --resume --budget {to_answer} does both."
        )
    missing = {
        "O3": not has_o3,
        "a second timing of O0": not has_again,
        counted(wish.seeds - plan.seeds, "more seed"): wish.seeds > plan.seeds,
        "rounds of timing": wish.rounds > max(plan.rounds, plan.seeds),
    }
    names = ", ".join(name for name, is_missing in missing.items() if is_missing)
    return f"Left out: {names}. --resume --budget {to_have_all} has all." if names else ""


def duration(seconds: float) -> str:
    """`0:03:20`."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _step(run: Run) -> float:
    """Seconds of a step; 0 where none was timed."""
    return (step_ms(run.measured) or 0.0) / 1000


def _beside_steps(run: Run) -> float:
    return max(0.0, run.seconds - run.steps * _step(run))


def _means(pairs: Iterable[tuple[Case, float]]) -> dict[Case, float]:
    values: dict[Case, list[float]] = {}
    for case, value in pairs:
        values.setdefault(case, []).append(value)
    return {case: statistics.mean(of_case) for case, of_case in values.items()}
