"""The run at O0 with the probe in it: started once for its options, and its findings read."""

from __future__ import annotations

import math
from pathlib import Path

from ampatch.sweep.measure.record import Measured, Run, Series
from ampatch.sweep.report.figures import OK, status
from ampatch.sweep.report.results import RUNS
from ampatch.sweep.trial import BASE
from ampatch.tune.probe import SAMPLES, ProbeOptions
from ampatch.tune.sensitivity import Findings
from ampatch.tune.task import Task
from ampatch.tune.trials import Trials
from ampatch.tune.verdict import TuneError

PROBE = "probe"  # its directory
SAME = 1e-3  # relative; the probe has compiled models run eagerly, which differ in bits

_OPTIONS = (
    *("module", "override_seeds", "timeout", "nproc_per_node"),
    *("engine", "devices", "address", "gpus_per_trial", "cpus_per_trial"),
)
"""Options of the sweep that the run shares."""


def findings(task: Task, trials: Trials, steps: int, depth: int | None) -> Findings:
    """What the probe found in `steps` steps; one with other options runs anew."""
    place = task.directory / PROBE
    file = (place / "sensitivity.json").resolve()
    scale = trials.properties()["loss_scale"]
    asked = ProbeOptions(
        file=str(file),
        steps=steps,
        opt_level=task.level.opt_level,
        dtype=task.dtype,
        scale=None if scale == "dynamic" else float(scale),
        depth=depth,
    )
    done = place / "done"
    text = asked.to_text()
    found = Findings.read(file) if done.exists() and done.read_text() == text else None
    if found is None:
        _run(task, trials, place, asked)
        found = Findings.read(file) or Findings()
        task.say(
            f"{len(found.modules)} modules in {found.steps} steps: {found.seconds:.2g} s beside "
            "the training; copies in memory at once: "
            f"{found.at_once}, of {found.copied / 2**20:.2g} MiB."
        )
        done.write_text(text)
    if not found.modules:
        raise TuneError(
            f"{task.script}: no module of a model was seen to compute anything at O0. "
            "Expected a script that calls ampatch.initialize(model, ...) and then the model."
        )
    return found


def _run(task: Task, trials: Trials, place: Path, asked: ProbeOptions) -> None:
    task.say(
        f"Sensitivity: copies of each module compute {SAMPLES} of its calls in FP32 and in "
        f"{task.dtype}, in {asked.steps} steps at O0. In memory are those of the "
        "few modules whose turn it is."
    )
    sweep = task.sweep(
        [BASE],
        place,
        _OPTIONS,
        rounds=1,
        steps=asked.steps + 2,
        kind=trials.kind,
        probe=("ampatch.tune.probe", asked.to_text()),
        overwrite=True,
    )
    [run] = sweep.run(task.progress()).runs
    if status(run) != OK:
        raise TuneError(
            f"The probe's run at O0 {status(run)} (its output: {sweep.directory / RUNS}). "
            "With that put right, --resume goes on. Where memory was short, more --probe-steps "
            "keep fewer copies at once."
        )
    _compare_with_training(task, trials, run)


def _compare_with_training(task: Task, trials: Trials, probed: Run) -> None:
    """Say where the losses of the probe's run are not those of O0."""
    plain = next(run for run in trials.runs if run.case == BASE and not run.trial.short)
    step = departure(plain.measured or Measured(), probed.measured or Measured())
    if step is not None:
        task.say(
            f"The probe's run departs from that of O0 at step {step + 1}: the script does not "
            "repeat itself, or a forward changes something that is not in its module. What "
            "is said of modules is from another training; the trials are without the probe."
        )


def departure(plain: Measured, probed: Measured) -> int | None:
    """The first step at which a loss is another in the second run; None: there is none."""
    steps = []
    for name, series in plain.losses.items():
        losses = dict(zip(series.steps, series.values))
        other = probed.losses.get(name, Series())
        steps += [
            step
            for step, value in zip(other.steps, other.values)
            if step in losses and not math.isclose(value, losses[step], rel_tol=SAME)
        ]
    return min(steps, default=None)
