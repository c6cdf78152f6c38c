"""The run at O0 with the probe.  Its findings are stored and reused for the same options."""

from __future__ import annotations

import json
from pathlib import Path

from ampatch.sweep.report.results import RUNS
from ampatch.sweep.report.run_figures import OK, status
from ampatch.sweep.trial import BASE
from ampatch.tune.candidate_sweep import CandidateSweep, TuneTask
from ampatch.tune.probe import SAMPLES, ProbeOptions
from ampatch.tune.sensitivity import Findings
from ampatch.tune.verdict import TuneError

PROBE = "probe"  # the directory of the run
FINDINGS, DONE = "sensitivity.json", "done"

_SHARED_OPTIONS = (
    *("module", "override_seeds", "timeout", "nproc_per_node"),
    *("engine", "devices", "address", "gpus_per_trial", "cpus_per_trial"),
)
"""Options of the tuning that also apply to this run."""


def probe_or_read(task: TuneTask, candidate_sweep: CandidateSweep, steps: int) -> Findings:
    """Return stored findings of the probe in `steps` steps, or run it and return its findings."""
    directory = task.directory / PROBE
    file = (directory / FINDINGS).resolve()
    scale = candidate_sweep.properties()["loss_scale"]
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
        _run(task, candidate_sweep, directory, options, text)
        results = Findings.read(file) or Findings()
        done.write_text(text)
    if not results.modules:
        raise TuneError(
            f"{task.script}: no module of a model was seen to compute anything at O0. "
            "Expected a script that calls ampatch.initialize(model, ...) and then the model."
        )
    return results


def _run(
    task: TuneTask,
    candidate_sweep: CandidateSweep,
    directory: Path,
    options: ProbeOptions,
    text: str,
) -> None:
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
        kind=candidate_sweep.kind,
        probe=("ampatch.tune.probe", text),
        overwrite=True,
        files=(FINDINGS, DONE),
    )
    [run] = sweep.run(task.progress()).runs
    if status(run) != OK:
        raise TuneError(
            f"The probe's run at O0 {status(run)} (its output: {sweep.directory / RUNS}). "
            "Fix the cause, and continue with --resume. If memory was short, give more "
            "--probe-steps: fewer copies are then in memory at once."
        )
