"""Writes a sweep's runs to TensorBoard and Weights & Biases; a run written again is replaced.

* TensorBoard: event files in DIR/tensorboard, one directory for each run.
* Weights & Biases: a run of wandb for each run of the sweep, in one group.  The environment
  variables of wandb apply; `WANDB_MODE=offline` keeps the runs in DIR/wandb until `wandb sync`.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ampatch.sweep.measure.run_record import Measured, Run
from ampatch.sweep.report import provenance
from ampatch.sweep.report.results import EVENTS, StoredSweep, read_sweep
from ampatch.sweep.report.run_figures import status

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # by option name


class Point(NamedTuple):
    """A value after `step` optimizer steps; `seconds` since the script began, None if unknown."""

    tag: str
    step: int
    value: float
    seconds: float | None


def points(run: Run) -> Iterator[Point]:
    """Points tagged `loss`, `loss/ID`, `loss scale`, `metrics/NAME`, `step ms` and `skipped`."""
    measured = run.measured or Measured()
    by_tag = {f"metrics/{name}": series for name, series in measured.metrics.items()}
    for tag, by_id in (("loss", measured.losses), ("loss scale", measured.loss_scales)):
        by_tag |= {
            tag if loss_id == "0" else f"{tag}/{loss_id}": series
            for loss_id, series in by_id.items()
        }
    for tag, series in by_tag.items():
        seconds = series.seconds or [None] * len(series.values)
        yield from map(Point, itertools.repeat(tag), series.steps, series.values, seconds)
    for step, duration in enumerate(measured.step_seconds):
        if duration is not None:
            yield Point("step ms", step, duration * 1000, None)
    for step, skipped in enumerate(measured.skipped):
        yield Point("skipped", step, float(skipped), None)


def check(name: str) -> None:
    """Raise `ImportError` if the library of the tracker is missing."""
    try:
        importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ImportError(
            f'--{name}: {name} is not installed. pip install "ampatch[{name}]", or leave it out.'
        ) from error


def write(name: str, directory: str | Path) -> str:
    """Write the full runs of the sweep in `directory` to a tracker; returns how to see them.

    Raises `FileNotFoundError` if there is no sweep, `OSError` if the tracker refuses the runs.
    """
    sweep = read_sweep(directory)
    runs = [run for run in sweep.runs if not run.trial.short]
    return _wandb(sweep, runs) if name == "wandb" else _tensorboard(sweep, runs)


def _tensorboard(sweep: StoredSweep, runs: list[Run]) -> str:
    from torch.utils.tensorboard import SummaryWriter

    origin = "\n".join(f"- {line}" for line in provenance.lines(sweep.results))
    logs = sweep.directory / EVENTS
    began = datetime.fromisoformat(sweep.results.started).timestamp()
    for run in runs:
        for old_file in (logs / run.trial.file_stem).glob("events.out.tfevents.*"):
            old_file.unlink()
        with SummaryWriter(str(logs / run.trial.file_stem)) as writer:
            writer.add_text("where the figures come from", origin)
            for tag, step, value, seconds in points(run):
                time = None if seconds is None else began + seconds
                writer.add_scalar(tag, value, step, walltime=time)
    return f"TensorBoard: tensorboard --logdir {logs}"


def _wandb(sweep: StoredSweep, runs: list[Run]) -> str:
    import wandb

    # wandb must not record facts of this process, because another process trained.
    switched_on = ("silent", "disable_git", "disable_code", "x_disable_stats", "x_disable_meta")
    shared = {
        "settings": wandb.Settings(console="off", **dict.fromkeys(switched_on, True)),
        "project": os.environ.get("WANDB_PROJECT", "ampatch-sweep"),
        "group": f"{provenance.title(sweep.results)} {sweep.results.started}",
    }
    origin = provenance.facts(sweep.results)
    for run in runs:
        trial, case = run.trial, run.trial.case
        identity = f"{shared['group']} {sweep.directory.resolve()} {trial.file_stem}"
        run_id = hashlib.sha256(identity.encode()).hexdigest()[:12]  # equal if written again
        for old_folder in (sweep.directory / "wandb").glob(f"offline-run-*-{run_id}"):
            shutil.rmtree(old_folder)
        config = {"row": case.label, "opt_level": case.opt_level, "dtype": case.dtype or "float32"}
        config |= {"seed": trial.seed, "from": origin}
        options = {"id": run_id, "name": trial.label, "dir": sweep.directory, "config": config}
        try:
            with wandb.init(**shared, **options, reinit="create_new") as writer:
                ordered = sorted(points(run), key=lambda point: point.step)  # as wandb expects
                for step, at_step in itertools.groupby(ordered, key=lambda point: point.step):
                    writer.log({point.tag: point.value for point in at_step}, step=step)
                writer.summary.update({"status": status(run), "seconds": run.seconds})
        except wandb.errors.Error as error:
            raise OSError(
                f"wandb: {error} The sweep's own files are written; `ampatch report "
                f"{sweep.directory} --wandb` tries again. WANDB_MODE=offline needs no account."
            ) from error
    return f"Weights & Biases: project {shared['project']}, group {shared['group']}"
