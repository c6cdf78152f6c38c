"""Notes for readers of a sweep's results: about the script, and how runs were timed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from ampatch.sweep.cases_and_trials import DTYPES
from ampatch.sweep.execution.directory import RunFiles
from ampatch.sweep.execution.plan import Plan
from ampatch.sweep.kinds import Kind
from ampatch.sweep.measure.output_metrics import metric_hint
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.options import ROUNDS, SweepOptions
from ampatch.sweep.report.first_loss_check import first_loss_differences, first_loss_note
from ampatch.sweep.report.results import Row
from ampatch.sweep.report.rows import seeds_matter
from ampatch.sweep.report.run_figures import CRASHED, DIVERGED, OK, status
from ampatch.sweep.trial import BASE

_HOW_TO_SEED = (
    "--override-seeds makes the script's seeds depend on the trial's; or pass that on by -- --seed "
    "{seed}, or have the script read AMPATCH_SEED"
)


def script_notes(
    script: str,
    arguments: Sequence[str],
    options: SweepOptions,
    plan: Plan,
    runs: Sequence[Run],
    logs: Path,
) -> dict[str, str]:
    """Notes on what the script does, by subject; the most important ones first."""
    notes = {
        "starts": first_loss_note(script, first_loss_differences(runs)),
        "losses": _loss_note(script, runs),
        "metrics": _metric_note(runs, logs),
        "files": _files_note(runs),
        "seeds": _seed_note(script, arguments, options, runs) if plan.seeds > 1 else "",
        "autocast": _autocast_note(script, plan.kind, runs),
        "kind": kind_note(script, options, plan) if plan.kind.is_plain else "",
        "casts": _cast_note(script, runs),
    }
    return {about: note for about, note in notes.items() if note}


def kind_note(script: str, options: SweepOptions, plan: Plan) -> str:
    """The kind of a script without `initialize`, and which levels it lacks if all were wanted."""
    asks_for_all = plan.kind.is_plain and options.levels is None and options.rows is None
    note = f"{script} {plan.kind.description()}."
    return f"{note} {plan.kind.needs}." if asks_for_all else note


def measurement_notes(
    options: SweepOptions,
    plan: Plan,
    runs: Sequence[Run],
    rows: Sequence[Row],
    is_complete: bool,
) -> list[str]:
    """How the runs were timed, tested and ended."""
    size = plan.omission_note() if is_complete else plan.size_note()
    planned = [plan.half_speed_note(), size] if plan.has_budget else []
    copies = [_copies_note(runs)] if options.copies else []
    late = [_late_note(rows, plan.seeds)] if is_complete else []
    notes = [*planned, *_timing_notes(plan, runs), *filter(None, [*late, *copies])]
    if any(run.measured and run.measured.stopped_at for run in runs if not run.trial.short):
        notes.append(
            f"Runs were ended after {options.steps} steps, so metrics that the script reports at "
            "its end are missing. With {steps} among its arguments it ends by itself."
        )
    return notes


def tune_note(
    script: str, arguments: Sequence[str], options: SweepOptions, plan: Plan, rows: Sequence[Row]
) -> str:
    """The command `ampatch tune` for a level that trains worse than O0; "" for none."""
    base = next((row for row in rows if row.label == BASE.label), None)
    if options.rows is not None or plan.kind.is_plain or base is None or base.status != OK:
        return ""
    worse = (
        row
        for row in rows
        if row.engine == "ampatch"
        and not row.settings
        and row.dtype in DTYPES
        and (row.outcome == "worse" or row.status.startswith((CRASHED, DIVERGED)))
    )
    row = next(worse, None)
    if row is None:
        return ""
    program = ["-m", script] if options.module else [script]
    level = ["--opt-level", row.opt_level, "--dtype", row.dtype]
    after_script = ["--", *arguments] if arguments else []
    return (
        f"{row.name} does not train as O0 does. To find the modules that need FP32, if any: "
        f"ampatch tune {shlex.join([*program, *level, *after_script])}"
    )


def half_baseline_recommendation(script: str, kind: Kind) -> str:
    """Why O0 is no FP32 baseline; "" if it is one."""
    if not kind.half_weights:
        return ""
    return (
        f"None: O0 is not FP32. {script} trains weights in {' and '.join(kind.half_weights)} by "
        "itself (model.half(), a default dtype, a framework's pure half precision). Expected FP32 "
        "weights; leave half to the levels."
    )


def _seed_note(
    script: str, arguments: Sequence[str], options: SweepOptions, runs: Iterable[Run]
) -> str:
    """A note if seeds have no effect, or if the script seems to set constant ones.

    Two runs show whether a seed of the script depends on the trial's; one run does not.
    """
    bases = [run for run in runs if run.case == BASE and not run.trial.short and run.measured]
    own_seeds = [run.measured.own_seed for run in bases if run.measured.own_seed]
    if not seeds_matter(bases):
        where = f" ({own_seeds[0]})" if own_seeds else ""
        return (
            f"The seed does not reach the script{where}: O0 gives the same with each seed, so "
            f"accuracy is not tested. {_HOW_TO_SEED}."
        )
    is_passed_on = any("{seed}" in argument for argument in arguments)
    others = [run.trial.seed for run in bases if not run.measured.own_seed]
    # A call with the trial's own seed is not recorded, such as `random.seed(0)` with seed 0.
    is_same = bool(own_seeds and others) and all(f"({n})" in own_seeds[0] for n in others)
    is_constant = len(set(own_seeds)) == 1 and (len(own_seeds) > 1 or is_same or not is_passed_on)
    if options.override_seeds or not is_constant:
        return ""
    return (
        f"{script} seeds itself: {own_seeds[0]}. What it draws after that does not depend on the "
        f"seed of the sweep. {_HOW_TO_SEED}."
    )


def _autocast_note(script: str, kind: Kind, runs: Iterable[Run]) -> str:
    """Where the script enters torch.autocast beside its `initialize`."""
    measured = (run.measured for run in runs if run.measured is not None)
    lines = list(dict.fromkeys(line for record in measured for line in record.autocast_off))
    if not lines or kind.lacks_initialize:
        return ""
    return (
        f"{script} enters torch.autocast itself ({', '.join(lines)}). At O0 these regions are "
        "off, or O0 would not be FP32; in the other rows they are on."
    )


def _cast_note(script: str, runs: Iterable[Run]) -> str:
    """A note if O1 had nothing to cast."""
    if not any(run.measured and run.measured.casts_nothing for run in runs):
        return ""
    return (
        f"O1 cast nothing: {script} trains tensors that are in no nn.Module, so O1 computes as O0 "
        "does. Casts begin where a module that has parameters is called: make them "
        "nn.Parameters of one, and compute in its forward."
    )


def _loss_note(script: str, runs: Iterable[Run]) -> str:
    """A note if a script trains without a loss that could be recorded."""
    trained = [run.measured for run in runs if run.measured and run.measured.skipped]
    if not trained or any(measured.losses for measured in trained):
        return ""
    return (
        f"{script}: no loss was recorded, as it calls neither scale_loss nor backward(). Rows are "
        "compared by metrics alone: have it print one (--metric), or call "
        "ampatch.log_metrics(loss=...)."
    )


def _copies_note(runs: Sequence[Run]) -> str:
    """Where the files of trials are that ran in copies of the folder."""
    links = ", ".join(name for run in runs for name in run.linked)
    linked = f" Linked, not copied, is what is hidden or large: {links}." if links else ""
    note = "Each trial ran in a copy of the current folder; what it wrote there stays in"
    return f"{note} runs/*.copy.{linked}" if runs else ""


def _files_note(runs: Sequence[Run]) -> str:
    """What O0 has written into the user's folder."""
    wrote = next((run.wrote for run in runs if run.wrote), [])
    if not wrote:
        return ""
    shown = ", ".join(wrote[:4]) + (f" and {len(wrote) - 4} more" if len(wrote) > 4 else "")
    return (
        f"O0 has written {shown}: trials overwrite one another's files and yours, and a trial may "
        "read what an earlier one has left. Give each its own place: -- --out "
        f"{{trial_dir}}/{Path(wrote[0]).parts[0]}, or a copy of the folder: --in-copy."
    )


def _metric_note(runs: Sequence[Run], logs: Path) -> str:
    """A note if the output seems to have a metric, and none was reported."""
    good = [run for run in runs if status(run) == OK and not run.trial.short]
    if not good or any(run.measured.metrics for run in good):
        return ""
    log = RunFiles.of(logs, good[0].trial).log
    number = metric_hint(log, log.stat().st_size) if log.exists() else None
    if number is None:
        return ""
    return (
        f'The output has "{number[0]}", and no metric was given, so the last loss is compared. '
        f"--resume --metric {shlex.quote(number[1])} compares it too, and runs nothing again."
    )


def _late_note(rows: Sequence[Row], seeds: int) -> str:
    """A note if the speed of rows is not known, since they ran long after O0."""
    late = [
        row.name for row in rows if row.outcome not in ("baseline", "failed") and not row.speeds
    ]
    if not late or not any(row.speeds for row in rows):
        return ""
    return (
        f"{', '.join(late)} ran long after O0 with the same seed, so there is no speed to compare: "
        f"--resume --rounds {seeds + ROUNDS} times all rows again."
    )


def _timing_notes(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Which figures were timed alone, and whether on one machine."""
    timed = [run for run in runs if run.alone]
    notes = []
    if runs and not timed:
        has_short = any(trial.short for trial in plan.trials)
        more = "" if has_short else " --resume --rounds 3 adds runs that do."
        notes.append(f"No run ran alone on its device: no step time, no speed.{more}")
    elif len(timed) < len(runs):
        notes.append(
            f"Step time and speed are of the {len(timed)} of {len(runs)} runs that ran alone on "
            "their device; the others ran beside each other, for accuracy."
        )
    measured = [run for run in timed if run.measured and run.measured.device]
    machines = {f"{run.host} ({run.measured.device})" for run in measured}
    if len(machines) > 1:
        notes.append(
            f"Timed runs are from several machines or devices, {', '.join(sorted(machines))}: "
            "compare their speed only within one of them."
        )
    return notes
