"""A sweep's runs in MLflow: one experiment for the sweep, one of its runs for each.

Where they go is MLflow's own affair (`MLFLOW_TRACKING_URI`); without that it is a database in
the sweep's directory, `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db`.  A run that is
written again replaces the earlier one.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report import provenance
from ampatch.sweep.report.figures import OK, status
from ampatch.sweep.report.scalars import (
    Tracked,
    TrackerError,
    figures,
    scalars,
    settings,
    tracked,
)

DATABASE = "mlflow.db"
MISSING = (
    "MLflow needs mlflow, or mlflow-skinny with sqlalchemy and alembic, which are not installed. "
    "Do pip install ampatch[mlflow], or leave --mlflow out."
)
_MOST = 1000  # metrics that MLflow takes in one call
_RUN = "ampatch.run"  # the tag that tells whether a run was written before


def check() -> None:
    """Raise `ImportError` if mlflow is missing, or what its database needs."""
    try:
        import mlflow  # noqa: F401

        if "MLFLOW_TRACKING_URI" not in os.environ:
            import alembic  # noqa: F401
            import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error


def write_runs(directory: str | Path) -> str:
    """Write all whole runs of the sweep in `directory`; returns where they are.

    Raises `ImportError` if mlflow is missing, `FileNotFoundError` if there is no sweep,
    `TrackerError` if MLflow refuses them.
    """
    check()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    sweep = tracked(directory)
    own = f"sqlite:///{(sweep.directory / DATABASE).resolve()}"
    address = os.environ.get("MLFLOW_TRACKING_URI", own)
    try:
        client = MlflowClient(tracking_uri=address)
        experiment = _experiment(client, sweep)
        for run in sweep.runs:
            _write(client, experiment, sweep, run)
    except MlflowException as error:
        raise TrackerError(
            f"mlflow at {address}: {error} The sweep's own files are written; `ampatch report "
            f"{directory} --mlflow` tries again."
        ) from error
    return f"MLflow: mlflow ui --backend-store-uri {address}"


def _experiment(client: Any, sweep: Tracked) -> str:
    name = f"{provenance.title(sweep.results)} {sweep.results.started}"
    known = client.get_experiment_by_name(name)
    if known is not None:
        return known.experiment_id
    place = (sweep.directory / "mlartifacts").resolve().as_uri()
    return client.create_experiment(name, artifact_location=place)


def _write(client: Any, experiment: str, sweep: Tracked, run: Run) -> None:
    from mlflow.entities import Param

    stem = run.trial.file_stem
    for old in client.search_runs([experiment], f"tags.`{_RUN}` = '{stem}'"):
        client.delete_run(old.info.run_id)
    began = int(sweep.began * 1000)
    tags = {_RUN: stem, "status": status(run)}
    tags |= {f"from.{_name(key)}": text for key, text in provenance.facts(sweep.results).items()}
    made = client.create_run(experiment, start_time=began, tags=tags, run_name=run.trial.label)
    identity = made.info.run_id
    client.log_batch(identity, params=[Param(k, str(v)) for k, v in settings(run).items()])
    metrics = _metrics(run, began)
    while batch := list(itertools.islice(metrics, _MOST)):
        client.log_batch(identity, metrics=batch)
    how = "FINISHED" if status(run) == OK else "FAILED"
    client.set_terminated(identity, how, began + int(run.seconds * 1000))


def _metrics(run: Run, began: int) -> Iterator[Any]:
    from mlflow.entities import Metric

    for tag, series in scalars(run):
        for index, (step, value) in enumerate(zip(series.steps, series.values)):
            seconds = series.seconds[index] if series.seconds else 0.0
            yield Metric(_name(tag), value, began + int(seconds * 1000), step)
    for name, value in figures(run).items():
        yield Metric(_name(name), value, began, 0)


def _name(text: str) -> str:
    """`text` with the characters that MLflow has in names."""
    return re.sub(r"[^\w./ -]", "_", text, flags=re.ASCII)
