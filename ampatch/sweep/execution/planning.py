"""Which trials a sweep has: they follow from its options and from the kind of its script.

The kind is unknown until the first run at O0 shows it.  Then the plan is made anew, while that
run goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ampatch.config.sweep_options import SweepOptions
from ampatch.sweep.execution.default_dtypes import default_dtypes
from ampatch.sweep.json_files import restored
from ampatch.sweep.kinds import NO_AMP, TORCH_AMP, UNKNOWN, Kind
from ampatch.sweep.plan import DTYPES, cases, check_possible, trials
from ampatch.sweep.report.results import Results
from ampatch.sweep.trial import BASE, Case, Trial
from ampatch.torch_private.devices import has_tf32


class Plan:
    """The `cases` and `trials` of a sweep.  One that goes on has the kind and dtypes of `earlier`.

    Raises `ValueError` for rows that cannot be run.
    """

    def __init__(self, options: SweepOptions, earlier: Results | None) -> None:
        self._options = options
        known = {} if earlier is None else earlier.settings
        self.kind: Kind = (
            restored(Kind, known["kind"]) if "kind" in known else options.kind or UNKNOWN
        )
        self.dtypes: Sequence[str] = options.dtypes or DTYPES
        in_half = any(case.dtype in DTYPES for case in self._rows())  # what is wrong is said first
        if in_half and options.dtypes is None and options.rows is None:
            self.dtypes = known.get("dtypes") or default_dtypes()
        self._make()

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

    def place_of(self, trial: Trial) -> int:
        """Where a trial stands in the order of the plan."""
        return self._order[trial]

    def left(self, begun: Collection[Trial]) -> list[Trial]:
        """The trials that have not begun."""
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
        """What a resumed sweep must share of the plan: rows where the options do not name them."""
        rows = [case.label for case in self.cases]
        named = {} if self._options.rows is not None else {"rows": rows}
        return {"kind": self.kind, "dtypes": list(self.dtypes), **named}

    def _make(self) -> None:
        options = self._options
        self.cases = self._rows()
        self.trials = trials(
            self.cases,
            options.seeds,
            options.repeats,
            options.rounds,
            apart=options.side_by_side,
            fewer=options.fewer_seeds,
        )
        self._order = {trial: number for number, trial in enumerate(self.trials)}

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
