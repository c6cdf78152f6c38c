"""The run at O0 with the probe; its findings are stored, and used again for the same options."""

from __future__ import annotations

import json
from pathlib import Path

from ampatch.sweep.report.results import RUNS
from ampatch.sweep.report.run_figures import OK, status
from ampatch.sweep.trial import BASE
from ampatch.tune.probe import SAMPLES, ProbeOptions
from ampatch.tune.sensitivity import Findings
from ampatch.tune.trials import Task, Trials
from ampatch.tune.verdict import TuneError

PROBE = "probe"  # its directory
FINDINGS, DONE = "sensitivity.json", "done"

_SHARED_OPTIONS = (
    *("module", "override_seeds", "timeout", "nproc_per_node"),
    *("engine", "devices", "address", "gpus_per_trial", "cpus_per_trial"),
)
"""The options of the tuning that the run has as well."""


def findings(task: Task, trials: Trials, steps: int) -> Findings:
    """The findings of the probe in `steps` steps: the stored ones, or those of a new run."""
    directory = task.directory / PROBE
    file = (directory / FINDINGS).resolve()
    scale = trials.properties()["loss_scale"]
    options = ProbeOptions(
        file=str(file),
        steps=steps,
        opt_level=task.level.opt_level,
        dtype=task.dtype,
        scale=None if scale == "dynamic" else float(scale),
    )
    done = directory / DONE
    text = json.dumps(vars(options))
    results = Findings.read(file) if done.exists() and done.read_text() == text else None
    if results is None:
        _run(task, trials, directory, options, text)
        results = Findings.read(file) or Findings()
        done.write_text(text)
    if not results.modules:
        raise TuneError(
            f"{task.script}: no module of a model was seen to compute anything at O0. "
            "Expected a script that calls ampatch.initialize(model, ...) and then the model."
        )
    return results


def _run(task: Task, trials: Trials, directory: Path, options: ProbeOptions, text: str) -> None:
    task.say(
        f"Sensitivity: in {options.steps} steps at O0 a copy of each module computes {SAMPLES} of "
        f"its calls in FP32 and in {task.dtype}."
    )
    sweep = task.sweep(
        [BASE],
        directory,
        _SHARED_OPTIONS,
        rounds=1,
        steps=options.steps + 2,
        kind=trials.kind,
        probe=("ampatch.tune.probe", text),
        overwrite=True,
        files=(FINDINGS, DONE),
    )
    [run] = sweep.run(task.progress()).runs
    if status(run) != OK:
        raise TuneError(
            f"The probe's run at O0 {status(run)} (its output: {sweep.directory / RUNS}). "
            "Mend that, and go on with --resume. Where memory was short, more --probe-steps "
            "keep fewer copies at once."
        )
