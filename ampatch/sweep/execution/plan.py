"""The plan of a sweep: its trials, from the options, the kind of the script and the budget.

The first run at O0 shows the kind of the script.  The plan is then remade while the sweep runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ampatch.device_figures import has_tf32
from ampatch.diagnose.speed import HalfSpeeds
from ampatch.sweep.cases_and_trials import DTYPES, cases, check_possible
from ampatch.sweep.execution import budget
from ampatch.sweep.execution.budget import MIN_TIMED_STEPS, PlanSize, Timings
from ampatch.sweep.execution.half_dtypes import measure_half_dtypes
from ampatch.sweep.json_files import from_json
from ampatch.sweep.kinds import NO_AMP, TORCH_AMP, UNKNOWN_KIND, Kind
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.options import ROUNDS, SweepOptions
from ampatch.sweep.report.numbers import pluralize
from ampatch.sweep.report.paired_test import MIN_TEST_SEEDS
from ampatch.sweep.report.results import Results
from ampatch.sweep.trial import BASE, Case, Trial


class Plan:
    """The `cases` and `trials` of a sweep.  A resumed sweep keeps the plan of `earlier`.

    `wanted` is the size that the user requests, `chosen` the one that fits the budget.  `possible`
    has the trials of all sizes that may still be chosen, `order` their positions in the plan.
    Raises `ValueError` for rows that cannot run.
    """

    def __init__(self, options: SweepOptions, earlier: Results | None) -> None:
        self._options = options
        self._recorded = recorded = {} if earlier is None else {**earlier.settings, **earlier.plan}
        self.kind: Kind = options.kind or UNKNOWN_KIND
        if "kind" in recorded:
            self.kind = from_json(Kind, recorded["kind"])
        self.dtypes: Sequence[str] = options.dtypes or DTYPES
        self.cases = self._make_cases()  # raises before anything is measured
        self._minutes = self._budget(self.cases)
        has_half_rows = any(case.dtype in DTYPES for case in self.cases)
        chooses_dtypes = options.dtypes is None and options.rows is None
        self._half_speeds = HalfSpeeds(
            recorded.get("dtypes", ()), *recorded.get("half_speeds", ({}, {}))
        )
        needs_speeds = has_half_rows and (chooses_dtypes or self._minutes is not None)
        if needs_speeds and not self._half_speeds.lowest:
            self._half_speeds = measure_half_dtypes()
        if has_half_rows and chooses_dtypes:
            self.dtypes = recorded.get("dtypes") or self._half_speeds.fast
        self._timings: Timings | None = None
        self._ended: Collection[Trial] = ()
        self.wanted = self.chosen = self._wanted_size(self.cases)
        self._set_trials()

    @property
    def seeds(self) -> int:
        """The number of seeds of O0."""
        return max(1, self.chosen.seeds)

    def replan(self, runs: Sequence[Run]) -> bool:
        """Choose the size again from all runs; returns whether to tell the user about the plan."""
        earlier_timings = self._timings
        tested_accuracy = self.chosen.tests_accuracy(self.wanted)
        self._timings = Timings.of(runs, self._half_speeds.lowest)
        self._ended = {run.trial for run in runs}
        if self._minutes is not None and self._timings is not None:
            self.chosen = budget.choose_size(
                self.cases, self.wanted, self._minutes, self._timings, self._ended
            )
        self._set_trials()
        is_first = earlier_timings is None and self._timings is not None
        return is_first or tested_accuracy != self.chosen.tests_accuracy(self.wanted)

    def size_note(self) -> str:
        """What is planned, and what is left out for the budget.

        "" before the first run of O0, for rows that the caller chose, for a single row, and if
        trials run side by side.
        """
        has_no_size = self._options.rows is not None or self._options.side_by_side
        if self._timings is None or has_no_size or len(self.cases) == 1:
            return ""
        chosen, minutes = self.chosen, self._minutes
        seconds = self._timings.sweep_seconds(self.cases, chosen, self._ended)
        limit = "" if minutes is None else f" for --budget {minutes:g}"
        note = f"Planned{limit}: {pluralize(self.seeds, 'seed')}"
        if chosen.rounds > chosen.seeds:  # each seed is a round of timing
            note += f" and {pluralize(chosen.rounds, 'round')} of timing"
        names = dict.fromkeys(case.level_name for case in chosen.included(self.cases))
        note += f" of {', '.join(names)}"
        if not chosen.seeds:
            note += f", in which all but O0 take {MIN_TIMED_STEPS} steps"
        note += f"; about {budget.duration_text(seconds)} in all."
        if minutes is not None and seconds > 60 * minutes:
            note += " This is more than the budget, but a smaller plan could not compare the rows."
        return f"{note} {self.omission_note()}".strip()

    def omission_note(self) -> str:
        """What the budget leaves out, and the budget that suffices for it; "" if nothing."""
        timings, wanted, chosen = self._timings, self.wanted, self.chosen
        if not self.has_budget or timings is None:
            return ""
        if not chosen.tests_accuracy(wanted):
            return (
                f"{pluralize(self.seeds, 'seed')} can show how fast the rows are. Comparing their "
                f"accuracy takes {MIN_TEST_SEEDS} seeds: run again with {self.resume_options()}."
            )
        with_o3 = dataclasses.replace(chosen, all_rows=True).trials(self.cases)
        omitted_trials = [
            trial for trial in with_o3 if not trial.short and trial not in self.trials
        ]
        omissions = {
            "O3": any(budget.is_due(trial, timings.failed) for trial in omitted_trials),
            "a second timing of O0": not any(trial.again for trial in self.trials),
            pluralize(wanted.seeds - chosen.seeds, "more seed"): wanted.seeds > chosen.seeds,
            "rounds of timing": wanted.rounds > max(chosen.rounds, chosen.seeds),
        }
        names = ", ".join(name for name, is_omitted in omissions.items() if is_omitted)
        minutes = timings.minutes_for(self.cases, wanted, self._ended)
        return names and f"Left out: {names}. --resume --budget {minutes} runs all of it."

    def resume_options(self) -> str:
        """The options of `ampatch sweep` that add a test of accuracy; "" if the plan has one."""
        timings = self._timings
        if timings is None or not self.has_budget or self.chosen.tests_accuracy(self.wanted):
            return ""
        size = PlanSize(min(self.wanted.seeds, MIN_TEST_SEEDS), self.wanted.rounds, all_rows=False)
        return f"--resume --budget {timings.minutes_for(self.cases, size, self._ended)}"

    def half_speed_note(self) -> str:
        """How fast the half dtypes of the rows are on this machine; "" if not measured."""
        lowest, highest = self._half_speeds.lowest, self._half_speeds.highest
        used = {name for case in self.cases for name in (case.dtype or "").split("+")}
        names = [name for name in lowest if name in used]
        speeds = (f"{n} {lowest[n]:.2f}x to {highest[n]:.2f}x" for n in names)
        if not names:
            return ""
        return f"Speed of the half dtypes on this machine, relative to FP32: {', '.join(speeds)}."

    def seconds_left(self, begun: Collection[Trial]) -> float | None:
        """How long the trials that have not begun will take; None if unknown."""
        if self._timings is None or self._options.side_by_side:
            return None
        few_steps = not self.chosen.seeds
        return sum(self._timings.trial_seconds(trial, few_steps) for trial in self.remaining(begun))

    def steps(self, trial: Trial, runs: Iterable[Run]) -> int | None:
        """After how many optimizer steps a trial is ended; None if it ends by itself."""
        if not trial.short:
            return self._options.steps
        steps = budget.short_steps(runs) if self.chosen.seeds else MIN_TIMED_STEPS
        return min(filter(None, (self._options.steps, steps)), default=None)

    def exceeds_budget(self, seconds: float) -> bool:
        """Whether this is longer than the budget of the whole sweep."""
        return self._minutes is not None and seconds > 60 * self._minutes

    def recognize(self, kind: Kind) -> bool:
        """Set the kind that a run shows.  Returns whether it is new; then the plan has changed.

        Raises `ValueError` for rows of the options that this kind cannot run.
        """
        shows_more = self.kind.name == NO_AMP and kind.name == TORCH_AMP
        if not kind or (self.kind and not shows_more):
            return False
        self.kind = kind
        self._set_trials()
        return True

    def remaining(self, begun: Collection[Trial]) -> list[Trial]:
        return [trial for trial in self.trials if trial not in begun]

    def queues(
        self, begun: Collection[Trial], base_has_run: bool
    ) -> tuple[list[Trial], list[Trial]]:
        """The remaining trials that run side by side, and those that run alone.

        O0 comes first if it has to show the kind.
        """
        remaining = self.remaining(begun)
        if not (self.kind or base_has_run):
            first = next((trial for trial in remaining if trial.case == BASE), None)
            remaining.sort(key=lambda trial: trial is not first)
        side_by_side = self._options.side_by_side
        return (
            [trial for trial in remaining if side_by_side and not trial.short],
            [trial for trial in remaining if not side_by_side or trial.short],
        )

    def settings(self) -> dict[str, Any]:
        """The settings that a resumed sweep must share; it may have more seeds and rounds."""
        labels = [case.label for case in self.cases]
        return {
            "kind": self.kind,
            "dtypes": list(self.dtypes),
            **({"rows": labels} if self._options.rows is None else {}),
            "seeds": self.wanted.seeds,
            "rounds": self.wanted.rounds,
        }

    def resume_record(self) -> dict[str, Any]:
        """What a resumed sweep keeps, unless its own options replace it."""
        return {
            "budget": self._minutes,
            "half_speeds": [self._half_speeds.lowest, self._half_speeds.highest],
            "amounts": dataclasses.asdict(self.chosen) if self.has_budget else None,  # chosen size
        }

    @property
    def has_budget(self) -> bool:
        """Whether this call has a budget, or the resumed sweep had one."""
        return self._minutes is not None or bool(self._recorded.get("amounts"))

    def _budget(self, cases: Sequence[Case]) -> float | None:
        """The minutes that the sweep may take; None if there is no limit."""
        options = self._options
        if options.budget is not None:
            if BASE not in cases:
                raise ValueError(
                    "--budget: expected O0 among the levels, since its first run says how long the "
                    "others take. Add O0 to --levels, or leave --budget out."
                )
            return options.budget
        if options.seeds or options.rounds:
            return None
        if self._recorded:
            return self._recorded.get("budget")
        can_compare = BASE in cases and len(cases) > 1
        is_timed = options.engine == "local" and not options.side_by_side
        return budget.DEFAULT_MINUTES if can_compare and is_timed else None

    def _wanted_size(self, cases: Sequence[Case]) -> PlanSize:
        """The size that is run if there is time."""
        options, recorded = self._options, self._recorded
        if recorded.get("amounts") and self._minutes is None:  # run what the budget had left out
            earlier = PlanSize(**recorded["amounts"])
            return PlanSize(options.seeds or earlier.seeds, options.rounds or earlier.rounds)
        rounds = options.rounds or recorded.get("rounds") or ROUNDS
        default = 1 if self._minutes is None or len(cases) == 1 else budget.DEFAULT_SEEDS
        return PlanSize(options.seeds or recorded.get("seeds") or default, rounds)

    def _set_trials(self) -> None:
        """Set `cases`, `trials`, `possible` and `order`; ended trials stay in the plan."""
        self.cases = self._make_cases()
        planned = self._trials_of(self.chosen)
        other_sizes = budget.sizes(self.wanted) if self.has_budget else ()
        their_trials = (trial for size in other_sizes for trial in self._trials_of(size))
        self.possible = list(dict.fromkeys([*planned, *their_trials]))
        ended_unplanned = [trial for trial in self._ended if trial not in planned]
        self.trials = [*ended_unplanned, *planned]
        order = dict.fromkeys([*self.possible, *ended_unplanned])
        self.order = {trial: number for number, trial in enumerate(order)}

    def _trials_of(self, size: PlanSize) -> list[Trial]:
        options = self._options
        ended = self._ended if self.has_budget else ()
        return size.trials(
            self.cases, ended, side_by_side=options.side_by_side, fewer_seeds=options.fewer_seeds
        )

    def _make_cases(self) -> list[Case]:
        options = self._options
        if options.rows is not None:
            return check_possible(list(dict.fromkeys(options.rows)), self.kind)
        return cases(
            options.levels, self.dtypes, overrides=options.overrides, autocast=options.autocast,
            tf32=has_tf32(), kind=self.kind,
        )  # fmt: skip
