"""A sweep's runs in experiment trackers; a run that is written again replaces the earlier one.

* TensorBoard: event files in DIR/tensorboard, one directory for each run.
* Weights & Biases: a run for each, in one group.  Where they go is wandb's own affair:
  `WANDB_MODE=offline` keeps them in DIR/wandb until `wandb sync`, `WANDB_PROJECT` and
  `WANDB_ENTITY` name the project.
* MLflow: one experiment for the sweep.  `MLFLOW_TRACKING_URI` says where; without it that is a
  database in the sweep's directory, `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db`.

`TRACKERS` has them by the name of the option.  `tracked.py` has what they are given.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ampatch.sweep.report import provenance
from ampatch.sweep.report.figures import OK
from ampatch.sweep.report.results import EVENTS, Stored, read_sweep
from ampatch.sweep.report.tracked import TrackedRun, whole

DATABASE = "mlflow.db"  # without MLFLOW_TRACKING_URI
PROJECT = "ampatch-sweep"  # without WANDB_PROJECT
_MOST = 1000  # metrics that MLflow takes in one call
_RUN = "ampatch.run"  # MLflow's tag that tells whether a run was written before


class TrackerError(OSError):
    """An experiment tracker, its service or its files refuse what is written."""


@dataclass(frozen=True)
class Tracker:
    """A tracker; `put` writes the runs and returns where they are."""

    name: str  # of its option, and of the extra
    needs: Callable[[], Sequence[str]]  # modules
    put: Callable[[Stored], str]
    refusal: tuple[str, str] | None = None  # its own error: module and class
    remedy: str = ""

    def check(self) -> None:
        """Raise `ImportError` if a library is missing."""
        for module in self.needs():
            try:
                importlib.import_module(module)
            except ImportError as error:
                missing = module.rpartition(".")[2]
                raise ImportError(
                    f'{missing} is not installed. Do pip install "ampatch[{self.name}]", or leave '
                    f"--{self.name} out."
                ) from error

    def write(self, directory: str | Path) -> str:
        """Write all whole runs of the sweep in `directory`; returns where they are.

        Raises `ImportError` if a library is missing, `FileNotFoundError` if there is no sweep,
        `TrackerError` if the tracker refuses them.
        """
        self.check()
        sweep = read_sweep(directory)
        try:
            return self.put(sweep)
        except self._refusals() as error:
            raise TrackerError(
                f"{self.name}: {error} The sweep's own files are written; `ampatch report "
                f"{directory} --{self.name}` tries again.{self.remedy}"
            ) from error

    def _refusals(self) -> tuple[type[Exception], ...]:
        if self.refusal is None:
            return ()
        module, name = self.refusal
        return (getattr(importlib.import_module(module), name),)


def _tensorboard(sweep: Stored) -> str:
    from torch.utils.tensorboard import SummaryWriter

    origin = "\n".join(f"- {line}" for line in provenance.lines(sweep.results))
    for tracked in whole(sweep.runs):
        place = sweep.directory / EVENTS / tracked.run.trial.file_stem
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(place)) as writer:
            writer.add_text("where the figures come from", origin)
            for tag, step, value, seconds in tracked.points:
                time = None if seconds is None else _began(sweep) + seconds
                writer.add_scalar(tag, value, step, walltime=time)
    return f"TensorBoard: tensorboard --logdir {sweep.directory / EVENTS}"


def _wandb(sweep: Stored) -> str:
    import wandb

    project, offline = os.environ.get("WANDB_PROJECT", PROJECT), False
    quiet = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True,
        x_disable_meta=True,  # of this process: it is not the one that trained
    )  # fmt: skip
    for tracked in whole(sweep.runs):
        text = f"{_name(sweep)} {sweep.directory.resolve()} {tracked.run.trial.file_stem}"
        identity = hashlib.sha256(text.encode()).hexdigest()[:12]  # the same whenever it is written
        for old in (sweep.directory / "wandb").glob(f"offline-run-*-{identity}"):
            shutil.rmtree(old)
        with wandb.init(
            project=project,
            group=_name(sweep),
            name=tracked.run.trial.label,
            id=identity,
            dir=sweep.directory,
            config={**tracked.settings, "from": provenance.facts(sweep.results)},
            reinit="create_new",
            settings=quiet,
        ) as writer:
            for step, points in itertools.groupby(_by_step(tracked), key=lambda one: one.step):
                writer.log({point.tag: point.value for point in points}, step=step)
            writer.summary.update({**tracked.figures, "status": tracked.status})
            offline = offline or bool(writer.offline)
    if offline:
        return f"Weights & Biases: wandb sync {sweep.directory}/wandb/offline-run-*"
    return f"Weights & Biases: project {project}, group {_name(sweep)}"


def _mlflow(sweep: Stored) -> str:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    own = f"sqlite:///{(sweep.directory / DATABASE).resolve()}"
    address = os.environ.get("MLFLOW_TRACKING_URI", own)
    client = MlflowClient(tracking_uri=address)
    experiment = _experiment(client, sweep)
    began = int(_began(sweep) * 1000)
    origin = {f"from.{_plain(k)}": text for k, text in provenance.facts(sweep.results).items()}
    for tracked in whole(sweep.runs):
        trial = tracked.run.trial
        for old in client.search_runs([experiment], f"tags.`{_RUN}` = '{trial.file_stem}'"):
            client.delete_run(old.info.run_id)
        tags = {_RUN: trial.file_stem, "status": tracked.status, **origin}
        made = client.create_run(experiment, start_time=began, tags=tags, run_name=trial.label)
        identity = made.info.run_id
        params = [Param(name, str(value)) for name, value in tracked.settings.items()]
        client.log_batch(identity, params=params)
        metrics = [
            Metric(_plain(tag), value, began + int((seconds or 0) * 1000), step)
            for tag, step, value, seconds in tracked.points
        ]
        metrics += [Metric(_plain(name), v, began, 0) for name, v in tracked.figures.items()]
        for start in range(0, len(metrics), _MOST):
            client.log_batch(identity, metrics=metrics[start : start + _MOST])
        how = "FINISHED" if tracked.status == OK else "FAILED"
        client.set_terminated(identity, how, began + int(tracked.run.seconds * 1000))
    return f"MLflow: mlflow ui --backend-store-uri {address}"


def _experiment(client: Any, sweep: Stored) -> str:
    known = client.get_experiment_by_name(_name(sweep))
    if known is not None:
        return known.experiment_id
    place = (sweep.directory / "mlartifacts").resolve().as_uri()
    return client.create_experiment(_name(sweep), artifact_location=place)


def _name(sweep: Stored) -> str:
    """Tells it from other sweeps of the script."""
    return f"{provenance.title(sweep.results)} {sweep.results.started}"


def _began(sweep: Stored) -> float:
    """Seconds since the epoch."""
    return datetime.fromisoformat(sweep.results.started).timestamp()


def _by_step(tracked: TrackedRun) -> list[Any]:
    """The points in the order of steps, which wandb expects."""
    return sorted(tracked.points, key=lambda point: point.step)


def _plain(text: str) -> str:
    """`text` with the characters that MLflow has in names."""
    return re.sub(r"[^\w./ -]", "_", text, flags=re.ASCII)


def _needs_of_mlflow() -> Sequence[str]:
    """What its own database needs beside mlflow-skinny, a server does not."""
    database = () if "MLFLOW_TRACKING_URI" in os.environ else ("sqlalchemy", "alembic")
    return ("mlflow", *database)


TRACKERS = {
    "tensorboard": Tracker("tensorboard", lambda: ["torch.utils.tensorboard"], _tensorboard),
    "wandb": Tracker(
        "wandb", lambda: ["wandb"], _wandb, ("wandb.errors", "Error"),
        " WANDB_MODE=offline needs no account.",
    ),
    "mlflow": Tracker(
        "mlflow", _needs_of_mlflow, _mlflow, ("mlflow.exceptions", "MlflowException")
    ),
}  # fmt: skip
