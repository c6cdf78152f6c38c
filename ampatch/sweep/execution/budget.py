"""How much of a sweep fits its budget: what trials will take, and the largest plan that fits.

The first whole run of O0 says how long a process, a step and a run take.  Another row is taken to
need O0's time, longer by the measured speed of its half type, until its own runs have shown theirs.
With each run that ends the plan is made anew, so a wrong guess costs one run.  All of it follows
from the records: a resumed sweep comes to the same plan.

What is given up, in this order:

* seeds, down to `TESTED`;
* whole runs of the rows that can only be slow: where half has been measured below `SLOW` of FP32's
  speed.  They never have more than `TESTED` seeds, which come last, when their timed runs
  have shown what they take;
* the other seeds but one, and with each number of them rounds, down to `FEWEST_ROUNDS`;
* whole runs of all rows but O0, whose timed runs then take `FEWEST_STEPS`.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampatch.sweep.execution.short_runs import short_steps
from ampatch.sweep.measure.record import Run
from ampatch.sweep.plan import trials
from ampatch.sweep.report.figures import OK, status, step_ms
from ampatch.sweep.report.numbers import counted
from ampatch.sweep.trial import BASE, Case, Trial

DEFAULT_MINUTES = 10.0
SLOW = 0.5  # of FP32's speed
SEEDS = 5  # are planned where the user names no number; five seeds show most differences of 1 %
TESTED = 3  # seeds: with two the test sees only what is enormous
FEWEST_ROUNDS = 2  # from which a speed can be told apart
FEWEST_STEPS = 6  # of a timed run: one without a time, one to warm up, and four
_USABLE = 0.95  # of the budget; the rest is between the runs


@dataclass(frozen=True)
class Amounts:
    """How many seeds each row has, those that can only be slow, and the rounds of timing.

    With `seeds` 0 only O0 has a whole run.
    """

    seeds: int
    slow_seeds: int
    rounds: int


@dataclass(frozen=True)
class Rows:
    """The rows, and those of them that can only be `slow`."""

    all: Sequence[Case]
    slow: frozenset[Case] = frozenset()

    def last(self, amounts: Amounts) -> dict[Case, int]:
        """The rows that are timed by short runs, by the number of seeds of their whole runs."""
        others = [case for case in self.all if case != BASE]
        seeds = {case: amounts.slow_seeds if case in self.slow else 0 for case in others}
        return {case: n for case, n in seeds.items() if case in self.slow or not amounts.seeds}

    def seeds(self, amounts: Amounts) -> int:
        """How many seeds O0 has: as many as any other row."""
        last = self.last(amounts)
        others_are_last = last and all(case == BASE or case in last for case in self.all)
        return max(1, *last.values()) if others_are_last else amounts.seeds

    def trials(self, amounts: Amounts) -> list[Trial]:
        """The trials of a plan, in their order."""
        seeds, last = self.seeds(amounts), self.last(amounts)
        return trials(self.all, seeds, amounts.rounds, last=last)


@dataclass(frozen=True)
class Facts:
    """What the runs that have ended say of the time that others will take, in seconds."""

    spent: float
    start: float  # of a process, without its training
    beside: float  # of a whole run of O0, without its steps
    steps: int  # of a whole run
    short: int  # steps of a timed run
    step: Mapping[Case, float]  # of rows that have run
    whole: Mapping[Case, float]  # a whole run of these
    lowest: Mapping[str, float]  # speed of each half type relative to FP32

    @classmethod
    def of(cls, runs: Sequence[Run], lowest: Mapping[str, float]) -> Facts | None:
        """None before a whole run of O0 has gone well."""
        bases = [
            run for run in runs if run.case == BASE and not run.trial.short and status(run) == OK
        ]
        if not bases:
            return None
        trained = [run for run in runs if _steps(run)]
        return cls(
            spent=sum(run.seconds for run in runs),
            start=min(map(_beside_steps, trained)),
            beside=statistics.mean(map(_beside_steps, bases)),
            steps=_steps(bases[0]),
            short=short_steps(bases) or FEWEST_STEPS,
            step=_means((run.case, _step(run)) for run in trained if _step(run)),
            whole=_means((run.case, run.seconds) for run in runs if not run.trial.short),
            lowest=lowest,
        )

    def of_step(self, case: Case) -> float:
        """A step of a row: as measured, or O0's with the speed of the half type."""
        halves = [min(1.0, self.lowest.get(name, 1.0)) for name in (case.dtype or "").split("+")]
        return self.step.get(case, self.step.get(BASE, 0.0) / min(halves))

    def of_trial(self, trial: Trial, few_steps: bool) -> float:
        """What a trial will take."""
        if trial.short:
            steps = FEWEST_STEPS if few_steps else min(self.short, self.steps)
            return self.start + steps * self.of_step(trial.case)
        guess = self.beside + self.steps * self.of_step(trial.case)
        return self.whole.get(trial.case, guess)


def plans(wish: Amounts) -> Iterator[Amounts]:
    """The plans to choose from, the largest first."""
    enough = min(wish.seeds, TESTED)
    for n in range(wish.seeds, enough - 1, -1):
        yield Amounts(n, min(n, wish.slow_seeds), wish.rounds)
    for slow in range(min(enough, wish.slow_seeds) - 1, -1, -1):
        yield Amounts(enough, slow, wish.rounds)
    rounds = range(wish.rounds, min(wish.rounds, FEWEST_ROUNDS) - 1, -1)
    for n, one in itertools.product(range(enough - 1, -1, -1), rounds):
        yield Amounts(n, 0, one)


def seconds(rows: Rows, amounts: Amounts, facts: Facts, begun: Collection[Trial]) -> float:
    """What the whole sweep will have taken, with what has run already."""
    last = rows.last(amounts)
    left = (trial for trial in rows.trials(amounts) if trial not in begun)
    return facts.spent + sum(facts.of_trial(one, one.case in last) for one in left)


def fitting(
    rows: Rows, wish: Amounts, minutes: float, facts: Facts, begun: Collection[Trial]
) -> Amounts:
    """The largest plan that takes no more than `minutes`, or the smallest that there is.

    A seed after the first that a row has begun is run by all rows: half a round compares nothing.
    """
    started = max((t.seed + 1 for t in begun if not t.short and t.case not in rows.slow), default=0)
    least = started if started > 1 else 0
    possible = [dataclasses.replace(one, seeds=max(one.seeds, least)) for one in plans(wish)]
    limit = _USABLE * 60 * minutes
    return next((p for p in possible if seconds(rows, p, facts, begun) <= limit), possible[-1])


def in_words(
    rows: Rows,
    wish: Amounts,
    amounts: Amounts,
    minutes: float | None,
    facts: Facts,
    begun: Collection[Trial],
) -> str:
    """What is planned and how long it takes, what was left out, and the budget that has it all."""
    taken = seconds(rows, amounts, facts, begun)
    limit = "" if minutes is None else f" for --budget {minutes:g}"
    said = [f"Planned{limit}: {_counts(rows, amounts)}, about {duration(taken)} in all."]
    last = rows.last(amounts)
    if last:
        names = ", ".join(case.label for case in last)
        whole = max(last.values())
        accuracy = f"{counted(whole, 'whole run')} each, at the end" if whole else "not tested"
        said.append(f"{names}: timed by runs of {FEWEST_STEPS} steps; accuracy: {accuracy}.")
    if minutes is not None and taken > 60 * minutes:
        said.append("No smaller plan says anything, so this one takes longer than its budget.")
    if rows.trials(amounts) != rows.trials(wish):
        enough = math.ceil(seconds(rows, wish, facts, begun) / 60 / _USABLE)
        said.append(f"--resume --budget {enough} runs all: {_counts(rows, wish)}.")
    return " ".join(said)


def _counts(rows: Rows, amounts: Amounts) -> str:
    """`3 seeds and 4 rounds of timing`."""
    seeds = rows.seeds(amounts)
    rounds = f" and {counted(amounts.rounds, 'round')} of timing"  # each seed is one, too
    return f"{counted(seeds, 'seed')}{rounds if amounts.rounds > seeds else ''}"


def duration(taken: float) -> str:
    """`0:03:20`."""
    return str(datetime.timedelta(seconds=round(taken)))


def _steps(run: Run) -> int:
    return len(run.measured.skipped) if run.measured else 0


def _step(run: Run) -> float:
    """Seconds of a step; 0 where none was timed."""
    return (step_ms(run.measured) or 0.0) / 1000


def _beside_steps(run: Run) -> float:
    return max(0.0, run.seconds - _steps(run) * _step(run))


def _means(pairs: Iterable[tuple[Case, float]]) -> dict[Case, float]:
    values: dict[Case, list[float]] = {}
    for case, value in pairs:
        values.setdefault(case, []).append(value)
    return {case: statistics.mean(of_case) for case, of_case in values.items()}
