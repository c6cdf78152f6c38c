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
    "Use --override-seeds to derive the script's seeds from the trial's, or pass the trial's seed "
    "with -- --seed {seed}, or read AMPATCH_SEED in the script"
)


def script_notes(
    script: str, arguments: Sequence[str], options: SweepOptions, plan: Plan, runs: Sequence[Run],
    logs: Path,
) -> dict[str, str]:  # fmt: skip
    """Notes on what the script does, by subject; the most important notes first."""
    notes = {
        "first losses": first_loss_note(script, first_loss_differences(runs)),
        "losses": _loss_note(script, runs),
        "metrics": _metric_note(runs, logs),
        "files": _files_note(runs),
        "seeds": _seed_note(script, arguments, options, runs) if plan.seeds > 1 else "",
        "autocast": _autocast_note(script, plan.kind, runs),
        "kind": kind_note(script, options, plan) if plan.kind.is_plain else "",
        "casts": _cast_note(script, runs),
    }
    return {subject: note for subject, note in notes.items() if note}


def kind_note(script: str, options: SweepOptions, plan: Plan) -> str:
    """The kind of the script and, unless levels were chosen, why some levels are missing."""
    wants_all = plan.kind.is_plain and options.levels is None and options.rows is None
    note = f"{script} {plan.kind.description()}."
    return f"{note} {plan.kind.needs}." if wants_all else note


def measurement_notes(
    options: SweepOptions, plan: Plan, runs: Sequence[Run], rows: Sequence[Row], is_complete: bool
) -> list[str]:
    """How the runs were timed, tested and ended."""
    notes = []
    if plan.has_budget:
        size_note = plan.omission_note() if is_complete else plan.size_note()
        notes += [plan.half_speed_note(), size_note]
    notes += _timing_notes(plan, runs)
    notes += [_late_note(rows, plan.seeds)] if is_complete else []
    notes += [_copies_note(runs)] if options.runs_in_copies else []
    if any(run.measured and run.measured.stopped_at for run in runs if not run.trial.short):
        notes.append(
            f"Runs were ended after {options.steps} steps, so metrics that the script reports at "
            "its end are missing. With {steps} among its arguments it ends by itself."
        )
    return [note for note in notes if note]


def tune_note(
    script: str, arguments: Sequence[str], options: SweepOptions, plan: Plan, rows: Sequence[Row]
) -> str:
    """The command `ampatch tune` for a level that trains worse than O0; "" if none does."""
    base = next((row for row in rows if row.label == BASE.label), None)
    if options.rows is not None or plan.kind.is_plain or base is None or base.status != OK:
        return ""
    worse_rows = (
        row
        for row in rows
        if row.engine == "ampatch"
        and not row.settings
        and row.dtype in DTYPES
        and (row.outcome == "worse" or row.status.startswith((CRASHED, DIVERGED)))
    )
    row = next(worse_rows, None)
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
    """The recommendation if O0 trains half weights, so is no FP32 baseline; "" if it is FP32."""
    if not kind.half_weights:
        return ""
    return (
        f"None: O0 is not FP32. {script} trains weights in {' and '.join(kind.half_weights)} by "
        "itself (model.half(), a default dtype, a framework's pure half precision). Keep the "
        "weights in FP32: the opt levels cast them."
    )


def _seed_note(
    script: str, arguments: Sequence[str], options: SweepOptions, runs: Iterable[Run]
) -> str:
    """A note if seeds have no effect, or if the script seems to set constant seeds.

    Two runs show whether a seed of the script depends on the trial's; one run does not.
    """
    bases = [run for run in runs if run.case == BASE and not run.trial.short and run.measured]
    script_seeds = [run.measured.own_seed for run in bases if run.measured.own_seed]
    if not seeds_matter(bases):
        call = f" ({script_seeds[0]})" if script_seeds else ""
        return (
            f"The seed does not reach the script{call}: O0 gives the same results with "
            f"every seed, so accuracy is not tested. {_HOW_TO_SEED}."
        )
    if options.override_seeds or not script_seeds:
        return ""
    is_passed_on = any("{seed}" in argument for argument in arguments)
    # A call with the seed of the trial is not recorded, such as `random.seed(0)` with seed 0.
    unrecorded = [run.trial.seed for run in bases if not run.measured.own_seed]
    is_trial_seed = bool(unrecorded) and all(f"({n})" in script_seeds[0] for n in unrecorded)
    is_constant = len(set(script_seeds)) == 1 and (
        len(script_seeds) > 1 or is_trial_seed or not is_passed_on
    )
    if not is_constant:
        return ""
    return (
        f"{script} seeds itself: {script_seeds[0]}. Random numbers drawn after this call do not "
        f"depend on the trial's seed. {_HOW_TO_SEED}."
    )


def _autocast_note(script: str, kind: Kind, runs: Iterable[Run]) -> str:
    """A note if the script calls `initialize` and enters torch.autocast as well."""
    measured_runs = (run.measured for run in runs if run.measured is not None)
    lines = list(dict.fromkeys(line for m in measured_runs for line in m.autocast_off))
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
        "does. ampatch casts inside the forward of modules that have parameters: make these "
        "tensors nn.Parameters of a module, and compute in its forward."
    )


def _loss_note(script: str, runs: Iterable[Run]) -> str:
    """A note if a script trains without a loss that could be recorded."""
    trained = [run.measured for run in runs if run.measured and run.measured.skipped]
    if not trained or any(measured.losses for measured in trained):
        return ""
    return (
        f"{script}: no loss was recorded, because the script calls neither scale_loss nor "
        "backward(). Rows are compared by metrics alone: have the script print one (--metric), or "
        "call ampatch.log_metrics(loss=...)."
    )


def _copies_note(runs: Sequence[Run]) -> str:
    """Where the files of trials that ran in copies of the folder are; "" without runs."""
    if not runs:
        return ""
    note = (
        "Each trial ran in a copy of the current folder; what it wrote there stays in runs/*.copy."
    )
    names = ", ".join(name for run in runs for name in run.linked)
    if names:
        note += f" Hidden folders, links and large entries are linked, not copied: {names}."
    return note


def _files_note(runs: Sequence[Run]) -> str:
    """A note if O0 has written into the user's folder."""
    wrote = next((run.wrote for run in runs if run.wrote), [])
    if not wrote:
        return ""
    shown = ", ".join(wrote[:4]) + (f" and {len(wrote) - 4} more" if len(wrote) > 4 else "")
    return (
        f"O0 has written {shown}: trials overwrite one another's files and yours, and a trial may "
        "read what an earlier one has left. Give each trial its own folder (-- --out "
        f"{{trial_dir}}/{Path(wrote[0]).parts[0]}), or run each trial in a copy of this folder "
        "(--in-copy)."
    )


def _metric_note(runs: Sequence[Run], logs: Path) -> str:
    """A note if the output seems to have a metric, but no metric was reported."""
    good = [run for run in runs if status(run) == OK and not run.trial.short]
    if not good or any(run.measured.metrics for run in good):
        return ""
    log = RunFiles.of(logs, good[0].trial).log
    hint = metric_hint(log, log.stat().st_size) if log.exists() else None
    if hint is None:
        return ""
    example, pattern = hint
    return (
        f'The output has "{example}", and no metric was given, so the last loss is compared. '
        f"--resume --metric {shlex.quote(pattern)} compares this number too, without running a "
        "trial again."
    )


def _late_note(rows: Sequence[Row], seeds: int) -> str:
    """A note if rows have no speed, because they ran long after O0."""
    late_rows = [
        row.name for row in rows if row.outcome not in ("baseline", "failed") and not row.speeds
    ]
    if not late_rows or not any(row.speeds for row in rows):
        return ""
    return (
        f"{', '.join(late_rows)} ran long after O0 with the same seed, so there is no speed to "
        f"compare: --resume --rounds {seeds + ROUNDS} times all rows again."
    )


def _timing_notes(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Notes if not all runs ran alone on their device, or if they ran on several machines."""
    timed = [run for run in runs if run.alone]
    notes = []
    if runs and not timed:
        note = "No run had its device to itself, so there is no step time and no speed."
        if not any(trial.short for trial in plan.trials):
            note += " --resume --rounds 3 adds such runs."
        notes.append(note)
    elif len(timed) < len(runs):
        notes.append(
            f"Step time and speed are of the {len(timed)} of {len(runs)} runs that ran alone on "
            "their device; the others ran at the same time, for accuracy."
        )
    measured = [run for run in timed if run.measured and run.measured.device]
    machines = {f"{run.host} ({run.measured.device})" for run in measured}
    if len(machines) > 1:
        notes.append(
            f"Timed runs are from several machines or devices, {', '.join(sorted(machines))}: "
            "compare their speed only within one of them."
        )
    return notes
