"""Writes a sweep's runs to TensorBoard and Weights & Biases; a run written again is replaced.

* TensorBoard: event files in DIR/tensorboard, one directory for each run.
* Weights & Biases: one run for each, in one group; wandb's own variables apply, and
  `WANDB_MODE=offline` keeps the runs in DIR/wandb until `wandb sync`.
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

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # by the name of the option


class Point(NamedTuple):
    """A value against optimizer steps; `seconds` are those since the script began, if known."""

    tag: str
    step: int
    value: float
    seconds: float | None


def points(run: Run) -> Iterator[Point]:
    """`loss`, `loss scale`, `metrics/NAME`, `step ms`, `skipped`; other losses: `loss/ID`."""
    measured = run.measured or Measured()
    series = {f"metrics/{name}": values for name, values in measured.metrics.items()}
    for tag, table in (("loss", measured.losses), ("loss scale", measured.loss_scales)):
        series |= {
            tag if name == "0" else f"{tag}/{name}": values for name, values in table.items()
        }
    for tag, values in series.items():
        seconds = values.seconds or [None] * len(values.values)
        yield from map(Point, itertools.repeat(tag), values.steps, values.values, seconds)
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
    """Write the whole runs of the sweep in `directory` to a tracker; returns where they are.

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
        for old in (logs / run.trial.file_stem).glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(logs / run.trial.file_stem)) as writer:
            writer.add_text("where the figures come from", origin)
            for tag, step, value, seconds in points(run):
                time = None if seconds is None else began + seconds
                writer.add_scalar(tag, value, step, walltime=time)
    return f"TensorBoard: tensorboard --logdir {logs}"


def _wandb(sweep: StoredSweep, runs: list[Run]) -> str:
    import wandb

    quiet = ("silent", "disable_git", "disable_code", "x_disable_stats", "x_disable_meta")
    about = {  # without facts of this process, which is not the one that trained
        "settings": wandb.Settings(console="off", **dict.fromkeys(quiet, True)),
        "project": os.environ.get("WANDB_PROJECT", "ampatch-sweep"),
        "group": f"{provenance.title(sweep.results)} {sweep.results.started}",
    }
    origin = provenance.facts(sweep.results)
    for run in runs:
        trial, case = run.trial, run.trial.case
        identity = f"{about['group']} {sweep.directory.resolve()} {trial.file_stem}"
        name = hashlib.sha256(identity.encode()).hexdigest()[:12]  # the same whenever it is written
        for old in (sweep.directory / "wandb").glob(f"offline-run-*-{name}"):
            shutil.rmtree(old)
        config = {"row": case.label, "opt_level": case.opt_level, "dtype": case.dtype or "float32"}
        config |= {"seed": trial.seed, "from": origin}
        own = {"id": name, "name": trial.label, "dir": sweep.directory, "config": config}
        try:
            with wandb.init(**about, **own, reinit="create_new") as writer:
                ordered = sorted(points(run), key=lambda point: point.step)  # as wandb expects
                for step, there in itertools.groupby(ordered, key=lambda point: point.step):
                    writer.log({point.tag: point.value for point in there}, step=step)
                writer.summary.update({"status": status(run), "seconds": run.seconds})
        except wandb.errors.Error as error:
            raise OSError(
                f"wandb: {error} The sweep's own files are written; `ampatch report "
                f"{sweep.directory} --wandb` tries again. WANDB_MODE=offline needs no account."
            ) from error
    return f"Weights & Biases: project {about['project']}, group {about['group']}"
