"""A sweep's directory made by hand: what the engine would leave, without a process."""

import math

from ampatch.sweep.execution.directory import RunFiles
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.json_files import write_json
from ampatch.sweep.measure.run_record import Measured, Run, Series
from ampatch.sweep.report.provenance import machine_state
from ampatch.sweep.report.recommendation import recommendation
from ampatch.sweep.report.result_files import write_files
from ampatch.sweep.report.results import Results
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.trial import Case, Trial

CASES = (
    Case("O0"),
    Case("O1", "float16"),
    Case("O1", "bfloat16"),
    Case("O2", "float16", settings=(("loss_scale", "<b>$1$</b>"),)),
    Case("autocast", "float16", engine="autocast"),
)


def made_run(case, seed=0, steps=120, diverges=False, kind=None, **fields):
    """A loss that falls from 2 to 0.02, 10 ms a step at O0 and 5 ms elsewhere."""
    pace = 0.010 if case == CASES[0] else 0.005
    values = [2 * math.exp(-4.6 * step / steps) + 0.01 * seed for step in range(steps)]
    if diverges:
        values[steps // 2 :] = [math.nan] * (steps - steps // 2)
    seconds = [1 + pace * step for step in range(steps)]
    half = case.dtype == "float16"
    measured = Measured(
        opt_level=case.opt_level,
        skipped=[half and step == 3 for step in range(steps)],
        step_seconds=[None, *[pace] * (steps - 1)],
        losses={"0": Series(list(range(steps)), values, seconds)},
        metrics={"accuracy": Series([steps], [0.9 + 0.01 * seed])},
        loss_scales={"0": Series([0, 4], [65536.0, 32768.0]) if half else Series([0], [1.0])},
        loss_scale=32768.0 if half else 1.0,
        device="cpu",
        cpu_seconds=[None, *[2 * pace] * (steps - 1)],
        machine={"load_at_start": 0.5, "load_at_end": 1.5, "threads": 2, "cores": 2},
        memory_bytes=(400 if case == CASES[0] else 300) * 2**20,
    )
    for name, value in fields.items():
        setattr(measured, name, value)
    return Run(Trial(case, seed, **(kind or {})), 0, 2.5, measured)


def trained(trial, losses=(), steps=40, ms=1.0, accuracy=None, **fields):
    """A run that has these losses, and whose steps take `ms` milliseconds, or those of a list."""
    each = ms if isinstance(ms, list) else [ms] * (steps - 1)
    measured = Measured(
        opt_level=trial.case.opt_level,
        skipped=[False] * (len(each) + 1),
        step_seconds=[None, *(duration / 1000 for duration in each)],
        losses={"0": Series(list(range(len(losses))), list(losses))} if losses else {},
        metrics={} if accuracy is None else {"accuracy": Series([steps], [accuracy])},
        **fields,
    )
    return Run(trial, int(bool(measured.error)), 1.0, measured)


def stand_in(monkeypatch, run_of):
    """Each trial is `run_of(runner, trial, place)`, which is written down, in no time.

    No pictures are drawn of them.
    """

    def run(runner, trial, watch, place):
        run = run_of(runner, trial, place)
        write_json(RunFiles.of(runner.directory, trial).run, run.to_json())
        return run

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr("ampatch.sweep.report.render.pictures", lambda *_: [])


def made_sweep(directory, runs=None, script="train & <test>.py", notes=()):
    """Write `runs` (by default two seeds of each of `CASES`); returns the `Results`."""
    if runs is None:
        runs = [made_run(case, seed) for case in CASES for seed in (0, 1)]
        again = {"short": True, "again": True}
        runs += [made_run(CASES[0], seed, kind=again) for seed in (0, 1)]
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    for run in runs:
        write_json(directory / "runs" / f"{run.trial.file_stem}.json", run.to_json())
    rows = summarize(runs)
    results = Results(
        script=script,
        arguments=["--name", "a <b> c"],
        started="2026-11-21T10:00:00+00:00",
        planned=len(runs),
        settings={"seeds": 2, "rows": [case.label for case in CASES], "steps": None},
        versions={"ampatch": "1.2.3", "torch": "2.9", "cpu": "Some CPU, 2 cores"},
        machine=machine_state(runs),
        rows=rows,
        done=len(runs),
        recommendation=recommendation(rows),
        notes=list(notes),
        provenance={"command": "ampatch sweep", "git": "0123abc-dirty", "device": "cpu"},
        trials=[run.trial.file_stem for run in runs],
    )
    write_files(directory, results)
    return results
