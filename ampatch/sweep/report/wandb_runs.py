"""A sweep's runs in Weights & Biases: one of its runs for each, in one group.

Where they go is wandb's own affair: `WANDB_MODE=offline` keeps them in DIR/wandb until
`wandb sync`, `WANDB_PROJECT` and `WANDB_ENTITY` name the project.  A run that is written again
replaces the earlier one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from ampatch.sweep.measure.record import Run
from ampatch.sweep.report import provenance
from ampatch.sweep.report.figures import status
from ampatch.sweep.report.scalars import (
    Tracked,
    TrackerError,
    figures,
    scalars,
    settings,
    tracked,
)

PROJECT = "ampatch-sweep"  # where WANDB_PROJECT names none
MISSING = (
    "Weights & Biases needs wandb, which is not installed. Do pip install wandb, or pip install "
    "ampatch[wandb], or leave --wandb out."
)


def check() -> None:
    """Raise `ImportError` if wandb is missing."""
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error


def write_runs(directory: str | Path) -> str:
    """Write all whole runs of the sweep in `directory`; returns where they are.

    Raises `ImportError` if wandb is missing, `FileNotFoundError` if there is no sweep,
    `TrackerError` if wandb refuses them.
    """
    check()
    import wandb

    sweep = tracked(directory)
    try:
        offline = [_write(sweep, run) for run in sweep.runs]
    except wandb.errors.Error as error:
        raise TrackerError(
            f"wandb: {error} The sweep's own files are written; `ampatch report {directory} "
            "--wandb` tries again. WANDB_MODE=offline needs no account."
        ) from error
    if any(offline):
        return f"Weights & Biases: wandb sync {directory}/wandb/offline-run-*"
    return f"Weights & Biases: project {_project()}, group {_group(sweep)}"


def _write(sweep: Tracked, run: Run) -> bool:
    """Write one run; returns whether wandb is offline."""
    import wandb

    name = _id(sweep, run)
    for old in (sweep.directory / "wandb").glob(f"offline-run-*-{name}"):
        shutil.rmtree(old)
    quiet = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True,
        x_disable_meta=True,  # of this process: it is not the one that trained
    )  # fmt: skip
    with wandb.init(
        project=_project(),
        group=_group(sweep),
        name=run.trial.label,
        id=name,
        dir=sweep.directory,
        config={**settings(run), "from": provenance.facts(sweep.results)},
        reinit="create_new",
        settings=quiet,
    ) as writer:
        for step, values in _by_step(run).items():
            writer.log(values, step=step)
        writer.summary.update({**figures(run), "status": status(run)})
        return bool(writer.offline)


def _by_step(run: Run) -> dict[int, dict[str, Any]]:
    """The values at each step, in the order of steps; the last of several."""
    table: dict[int, dict[str, Any]] = {}
    for tag, series in scalars(run):
        for step, value in zip(series.steps, series.values):
            table.setdefault(step, {})[tag] = value
    return dict(sorted(table.items()))


def _project() -> str:
    return os.environ.get("WANDB_PROJECT", PROJECT)


def _group(sweep: Tracked) -> str:
    return f"{provenance.title(sweep.results)} {sweep.results.started}"


def _id(sweep: Tracked, run: Run) -> str:
    """Always the same for the same run of the same sweep."""
    text = f"{_group(sweep)} {sweep.directory.resolve()} {run.trial.file_stem}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
