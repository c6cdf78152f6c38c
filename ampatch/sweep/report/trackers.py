"""The experiment trackers that a sweep's runs can be written to, by the name of the option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ampatch.sweep.report import mlflow_runs, tensorboard_events, wandb_runs


@dataclass(frozen=True)
class Tracker:
    """`check` raises `ImportError` if the library is missing; `write` returns where it wrote."""

    check: Callable[[], None]
    write: Callable[[str | Path], str]


TRACKERS = {
    "tensorboard": Tracker(tensorboard_events.check, tensorboard_events.write_events),
    "wandb": Tracker(wandb_runs.check, wandb_runs.write_runs),
    "mlflow": Tracker(mlflow_runs.check, mlflow_runs.write_runs),
}
