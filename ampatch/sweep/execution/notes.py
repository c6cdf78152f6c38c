"""What a reader of a sweep's results should know: of the script, and of how runs were timed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from ampatch.config.sweep_options import SweepOptions
from ampatch.sweep.execution.planning import Plan
from ampatch.sweep.kinds import Kind
from ampatch.sweep.measure.record import Run
from ampatch.sweep.plan import DTYPES
from ampatch.sweep.report import paired, seed_check
from ampatch.sweep.report.figures import OK
from ampatch.sweep.report.results import Row
from ampatch.sweep.report.start_check import note as starts_note
from ampatch.sweep.report.start_check import other_starts
from ampatch.sweep.report.summary import seeds_matter
from ampatch.sweep.trial import BASE


def script_notes(
    script: str, arguments: Sequence[str], options: SweepOptions, plan: Plan, runs: Sequence[Run]
) -> dict[str, str]:
    """What the script does that a sweep has to tell, by what it is about."""
    notes = {
        **_seed_notes(script, arguments, options, plan, runs),
        "autocast": _autocast_note(script, plan.kind, runs),
        "losses": _loss_note(script, runs),
        "starts": starts_note(script, other_starts(runs), runs),
    }
    return {about: note for about, note in notes.items() if note}


def other_notes(options: SweepOptions, plan: Plan, runs: Sequence[Run]) -> list[str]:
    """How the runs were timed, tested and ended."""
    planned = [plan.speeds_in_words(), plan.in_words()] if plan.has_budget else []
    notes = [*planned, *_timing_notes(plan, runs)]
    if not paired.available() and any(run.trial.seed for run in runs):
        notes.append(paired.MISSING)
    if any(run.measured and run.measured.stopped_at for run in runs if not run.trial.short):
        notes.append(
            f"Runs were ended after {options.steps} steps; metrics that the script reports at "
            "its end are missing then. Give it {steps} among its arguments to let it end."
        )
    return notes


def tune_note(
    script: str,
    arguments: Sequence[str],
    options: SweepOptions,
    plan: Plan,
    rows: Sequence[Row],
) -> str:
    """What finds the part of the model that is the cause, where a level trains worse than O0."""
    base = next((row for row in rows if row.label == BASE.label), None)
    if options.rows is not None or plan.kind.is_plain or base is None or base.status != OK:
        return ""
    worse = (
        row
        for row in rows
        if row.engine == "ampatch"
        and not row.settings
        and row.dtype in DTYPES
        and (row.outcome == "worse" or row.status.startswith(("diverged", "crashed")))
    )
    row = next(worse, None)
    if row is None:
        return ""
    program = ["-m", script] if options.module else [script]
    level = ["--opt-level", row.opt_level, "--dtype", row.dtype]
    given = ["--", *arguments] if arguments else []
    return (
        f"{row.name} does not train as O0 does. Which modules need FP32, if any, says: ampatch "
        f"tune {shlex.join([*program, *level, *given])}"
    )


def facts(kind: Kind) -> dict[str, str]:
    """What the script is."""
    return {"script": kind.in_words()} if kind else {}


def baseline_trouble(script: str, kind: Kind) -> str:
    """Why there is nothing in FP32 to compare with."""
    if not kind.half_weights:
        return ""
    return (
        f"none: O0 is not FP32. {script} trains weights in {' and '.join(kind.half_weights)} by "
        "itself (model.half(), a default dtype, a framework's pure half precision). Expected FP32 "
        "weights; leave half to the levels."
    )


def _seed_notes(
    script: str, arguments: Sequence[str], options: SweepOptions, plan: Plan, runs: Iterable[Run]
) -> dict[str, str]:
    """What a sweep of several seeds says about seeds that the script sets itself."""
    if plan.seeds == 1:
        return {}
    of_first_row = [run for run in runs if run.case == plan.cases[0] and not run.trial.short]
    constant = seed_check.constant_seeds(of_first_row, arguments)
    notice = seed_check.notice(script, constant, options.override_seeds)
    if seeds_matter(runs):
        return {"seeds": notice}
    not_reached = seed_check.not_reached(constant, options.override_seeds)
    return {"seeds": notice, "their effect": not_reached}


def _autocast_note(script: str, kind: Kind, runs: Iterable[Run]) -> str:
    """Where the script enters torch.autocast beside its `initialize`."""
    measured = (run.measured for run in runs if run.measured is not None)
    places = list(dict.fromkeys(place for one in measured for place in one.autocast_off))
    if not places or kind.is_foreign:
        return ""
    return (
        f"{script} enters torch.autocast itself ({', '.join(places)}). At O0 these regions are "
        "off, or O0 would not be FP32; in the other rows they are on."
    )


def _loss_note(script: str, runs: Iterable[Run]) -> str:
    """That a script trains without a loss that could be recorded."""
    trained = [run.measured for run in runs if run.measured and run.measured.skipped]
    if not trained or any(measured.losses for measured in trained):
        return ""
    return (
        f"{script} steps its optimizers, but no loss was recorded: it calls neither scale_loss nor "
        "backward(), as where gradients come by torch.autograd.grad. Rows are not compared by "
        "their losses. Have it print a metric (--metric), or call ampatch.log_metrics(loss=...)."
    )


def _timing_notes(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Which figures were timed alone, and whether on one machine."""
    timed = [run for run in runs if run.alone]
    notes = []
    if runs and not timed:
        more = "" if any(trial.short for trial in plan.trials) else " --rounds 3 adds runs that do."
        notes.append(f"No run ran alone on its device: no step time, no speed.{more}")
    elif len(timed) < len(runs):
        notes.append(
            f"Step time and speed are of the {len(timed)} of {len(runs)} runs that ran alone on "
            "their device; the others ran beside each other, for accuracy."
        )
    measured = [run for run in timed if run.measured and run.measured.device]
    places = {f"{run.host} ({run.measured.device})" for run in measured}
    if len(places) > 1:
        notes.append(
            f"Timed runs are from several machines or devices, {', '.join(sorted(places))}: "
            "compare their speed only within one of them."
        )
    return notes
