"""The series and the facts of each run, as experiment trackers take them.

`tensorboard_events.py`, `wandb_runs.py` and `mlflow_runs.py` write these.  Short runs, which
are there for their timing alone, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ampatch.sweep.measure.record import Measured, Run, Series
from ampatch.sweep.report.figures import first_and_last, step_ms
from ampatch.sweep.report.results import Results, read_results, read_runs


class TrackerError(OSError):
    """An experiment tracker, its service or its files refuse what is written."""


@dataclass(frozen=True)
class Tracked:
    """A sweep's results and its whole runs."""

    directory: Path
    results: Results
    runs: list[Run]

    @property
    def began(self) -> float:
        """Seconds since the epoch."""
        return datetime.fromisoformat(self.results.started).timestamp()


def tracked(directory: str | Path) -> Tracked:
    """What lies in a sweep's directory.  Raises `FileNotFoundError` if there is no sweep."""
    path = Path(directory)
    results = read_results(path)
    if results is None:
        raise FileNotFoundError(f"{path}: there are no results of a sweep in this directory.")
    return Tracked(path, results, [run for run in read_runs(path) if not run.trial.short])


def scalars(run: Run) -> Iterator[tuple[str, Series]]:
    """`loss`, `loss scale`, `metrics/NAME`, `step ms`, `skipped`, against optimizer steps.

    Further losses are `loss/LOSS_ID`.
    """
    measured = run.measured or Measured()
    for tag, table in (("loss", measured.losses), ("loss scale", measured.loss_scales)):
        for loss_id, series in table.items():
            yield (tag if loss_id == "0" else f"{tag}/{loss_id}"), series
    for name, series in measured.metrics.items():
        yield f"metrics/{name}", series
    times = [(n, s * 1000) for n, s in enumerate(measured.step_seconds) if s is not None]
    yield "step ms", Series([n for n, _ in times], [ms for _, ms in times])
    skipped = list(map(float, measured.skipped))
    yield "skipped", Series(list(range(len(skipped))), skipped)


def settings(run: Run) -> dict[str, Any]:
    """What the run was to do."""
    trial = run.trial
    return {
        "opt_level": trial.case.opt_level,
        "dtype": trial.case.dtype or "float32",
        "engine": trial.case.engine,
        "settings": json.dumps(dict(trial.case.settings), default=str),
        "seed": trial.seed,
        "repeat": trial.repeat,
    }


def figures(run: Run) -> dict[str, float]:
    """What came of the run, as numbers; those that it did not measure are left out."""
    measured = run.measured or Measured()
    _, last = first_and_last(measured)
    found = {
        "final/loss": last,
        "final/step ms": step_ms(measured),
        "final/memory MiB": measured.memory_bytes and measured.memory_bytes / 2**20,
        "final/seconds": run.seconds,
        **{f"final/{name}": series.values[-1] for name, series in measured.metrics.items()},
    }
    return {name: value for name, value in found.items() if value is not None}
