"""Which trials a sweep has: they follow from its options and from the kind of its script.

The kind is unknown until the first run at O0 shows it.  Then the plan is made anew, while that
run goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ampatch.device_figures import has_tf32
from ampatch.diagnose.speed import HalfTypes
from ampatch.sweep.execution.budget import (
    DEFAULT_MINUTES,
    FEWEST_STEPS,
    SEEDS,
    Amounts,
    Facts,
    fitting,
    in_words,
    is_due,
    left_out,
    plans,
    short_steps,
)
from ampatch.sweep.execution.half_dtypes import measured
from ampatch.sweep.json_files import restored
from ampatch.sweep.kinds import NO_AMP, TORCH_AMP, UNKNOWN, Kind
from ampatch.sweep.measure.record import Run
from ampatch.sweep.options import ROUNDS, SweepOptions
from ampatch.sweep.plan import DTYPES, cases, check_possible
from ampatch.sweep.report.paired import TESTED
from ampatch.sweep.report.results import Results
from ampatch.sweep.trial import BASE, Case, Trial


class Plan:
    """The `cases` and `trials` of a sweep.  A resumed one keeps the plan of `earlier`.

    Raises `ValueError` for rows that cannot be run.
    """

    def __init__(self, options: SweepOptions, earlier: Results | None) -> None:
        self._options = options
        self._recorded = recorded = {} if earlier is None else {**earlier.settings, **earlier.plan}
        self.kind: Kind = (
            restored(Kind, recorded["kind"]) if "kind" in recorded else options.kind or UNKNOWN
        )
        self.dtypes: Sequence[str] = options.dtypes or DTYPES
        rows = self._rows()  # what is wrong is said first
        self._minutes = self._budget(rows)
        in_half = any(case.dtype in DTYPES for case in rows)
        is_open = options.dtypes is None and options.rows is None
        self._half = HalfTypes(recorded.get("dtypes", ()), *recorded.get("half_speeds", ({}, {})))
        if in_half and not self._half.lowest and (is_open or self._minutes is not None):
            self._half = measured()
        if in_half and is_open:
            self.dtypes = recorded.get("dtypes") or self._half.fast
        self._facts: Facts | None = None
        self._ended: Collection[Trial] = ()
        self.wish = self.amounts = self._wish(rows)
        self._make()

    @property
    def seeds(self) -> int:
        """How many seeds O0 has."""
        return max(1, self.amounts.seeds)

    def fit(self, runs: Sequence[Run]) -> bool:
        """Plan anew with what runs have shown; whether another question is answered then."""
        before = self._facts, self.amounts.answers_all(self.wish)
        self._facts = Facts.of(runs, self._half.lowest)
        self._ended = {run.trial for run in runs}
        if self._minutes is not None and self._facts is not None:
            self.amounts = fitting(self.cases, self.wish, self._minutes, self._facts, self._ended)
        self._make()
        is_first = before[0] is None and self._facts is not None
        return is_first or before[1] != self.amounts.answers_all(self.wish)

    def in_words(self) -> str:
        """What is planned and left out; "" before the first run of O0, and in a part of more."""
        is_part = self._options.rows is not None or self._options.side_by_side
        if self._facts is None or is_part or len(self.cases) == 1:
            return ""
        seconds = self._facts.of_plan(self.cases, self.amounts, self._ended)
        said = in_words(self.cases, self.amounts, self._minutes, seconds)
        return f"{said} {self.left_out()}".strip()

    def left_out(self) -> str:
        """What a budget has left out, and the budget that has it; "" for nothing."""
        if not self.has_budget or self._facts is None:
            return ""
        answers, complete = (
            self._facts.minutes(self.cases, plan, self._ended) for plan in (self._enough, self.wish)
        )
        whole = dataclasses.replace(self.amounts, all_rows=True).trials(self.cases)
        out = [trial for trial in whole if not trial.short and trial not in self.trials]
        has_o3 = not any(is_due(trial, self._facts.failed) for trial in out)
        has_again = any(trial.again for trial in self.trials)
        return left_out(self.wish, self.amounts, has_o3, has_again, answers, complete)

    def resume_options(self) -> str:
        """The options of `ampatch sweep` that answer what the plan leaves open; "" for none."""
        if self._facts is None or not self.has_budget or self.amounts.answers_all(self.wish):
            return ""
        return f"--resume --budget {self._facts.minutes(self.cases, self._enough, self._ended)}"

    @property
    def _enough(self) -> Amounts:
        return Amounts(min(self.wish.seeds, TESTED), self.wish.rounds, all_rows=False)

    def speeds_in_words(self) -> str:
        """How fast the half dtypes of the rows are here; "" where that was not measured."""
        lowest, highest = self._half.lowest, self._half.highest
        used = {name for case in self.cases for name in (case.dtype or "").split("+")}
        names = [name for name in lowest if name in used]
        each = (f"{n} {lowest[n]:.2f}x to {highest[n]:.2f}x" for n in names)
        return f"Speed of half here, FP32 is 1: {', '.join(each)}." if names else ""

    def seconds_left(self, begun: Collection[Trial]) -> float | None:
        """The seconds that trials yet to begin will take; None: unknown."""
        if self._facts is None or self._options.side_by_side:
            return None
        left = (trial for trial in self.trials if trial not in begun)
        return sum(self._facts.of_trial(trial, not self.amounts.seeds) for trial in left)

    def steps(self, trial: Trial, runs: Iterable[Run]) -> int | None:
        """After how many optimizer steps a trial ends; None: by itself."""
        if not trial.short:
            return self._options.steps
        few = short_steps(runs) if self.amounts.seeds else FEWEST_STEPS
        return min(filter(None, (self._options.steps, few)), default=None)

    def is_over(self, seconds: float) -> bool:
        return self._minutes is not None and seconds > 60 * self._minutes

    def recognize(self, kind: Kind) -> bool:
        """Whether a run shows the kind for the first time: then the plan is another one.

        Raises `ValueError` for rows that were asked for and that this kind cannot have.
        """
        shows_more = self.kind.name == NO_AMP and kind.name == TORCH_AMP
        if not kind or (self.kind and not shows_more):
            return False
        self.kind = kind
        self._make()
        return True

    def order_of(self, trial: Trial) -> int:
        return self._order[trial]

    def left(self, begun: Collection[Trial]) -> list[Trial]:
        return [trial for trial in self.trials if trial not in begun]

    def by_turn(
        self, begun: Collection[Trial], base_has_run: bool
    ) -> tuple[list[Trial], list[Trial]]:
        """The trials left that run beside each other, and those that run alone.

        O0 comes first where it has to show the kind.
        """
        left = self.left(begun)
        if not (self.kind or base_has_run):
            first = next((trial for trial in left if trial.case == BASE), None)
            left.sort(key=lambda trial: trial is not first)
        beside = self._options.side_by_side
        return (
            [trial for trial in left if beside and not trial.short],
            [trial for trial in left if not beside or trial.short],
        )

    def settings(self) -> dict[str, Any]:
        """The settings that a resumed sweep must have too; of seeds and rounds it may have more."""
        rows = [case.label for case in self.cases]
        named = {} if self._options.rows is not None else {"rows": rows}
        return {
            "kind": self.kind,
            "dtypes": list(self.dtypes),
            **named,
            "seeds": self.wish.seeds,
            "rounds": self.wish.rounds,
        }

    def to_resume(self) -> dict[str, Any]:
        """What a resumed sweep takes from this plan, unless its own options say otherwise."""
        return {
            "budget": self._minutes,
            "half_speeds": [self._half.lowest, self._half.highest],
            "amounts": dataclasses.asdict(self.amounts) if self.has_budget else None,
        }

    @property
    def has_budget(self) -> bool:
        """Whether the plan follows a budget: of this call, or of the sweep that it resumes."""
        return self._minutes is not None or bool(self._recorded.get("amounts"))

    def _budget(self, rows: Sequence[Case]) -> float | None:
        """The minutes that the sweep may take; None: any number."""
        options = self._options
        if options.budget is not None:
            if BASE not in rows:
                raise ValueError(
                    "--budget: expected O0 among the levels, since its first run says how long the "
                    "others take. Add O0 to --levels, or leave --budget out."
                )
            return options.budget
        if options.seeds or options.rounds:
            return None
        if self._recorded:
            return self._recorded.get("budget")
        can_compare = BASE in rows and len(rows) > 1
        alone = options.engine == "local" and not options.side_by_side
        return DEFAULT_MINUTES if can_compare and alone else None

    def _wish(self, rows: Sequence[Case]) -> Amounts:
        """What is run where there is time for it."""
        options, recorded = self._options, self._recorded
        if recorded.get("amounts") and self._minutes is None:  # more of what a budget left out
            had = Amounts(**recorded["amounts"])
            return Amounts(options.seeds or had.seeds, options.rounds or had.rounds)
        rounds = options.rounds or recorded.get("rounds") or ROUNDS
        usual = 1 if self._minutes is None or len(rows) == 1 else SEEDS
        return Amounts(options.seeds or recorded.get("seeds") or usual, rounds)

    def _make(self) -> None:
        self.cases = self._rows()
        planned = self._trials(self.amounts)
        others = plans(self.wish) if self.has_budget else ()
        more = (trial for amounts in others for trial in self._trials(amounts))
        self.possible = list(dict.fromkeys([*planned, *more]))
        dropped = [trial for trial in self._ended if trial not in planned]
        self.trials = [*dropped, *planned]
        order = dict.fromkeys([*self.possible, *dropped])
        self._order = {trial: number for number, trial in enumerate(order)}

    def _trials(self, amounts: Amounts) -> list[Trial]:
        options = self._options
        begun = self._ended if self.has_budget else ()
        apart, fewer = options.side_by_side, options.fewer_seeds
        return amounts.trials(self.cases, begun, apart=apart, fewer=fewer)

    def _rows(self) -> list[Case]:
        options = self._options
        if options.rows is not None:
            return check_possible(list(dict.fromkeys(options.rows)), self.kind)
        return cases(
            options.levels,
            self.dtypes,
            overrides=options.overrides,
            autocast=options.autocast,
            tf32=has_tf32(),
            kind=self.kind,
        )
