"""A sweep's whole runs as experiment trackers take them: points, settings and figures.

Short runs, which are there for their timing alone, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ampatch.sweep.measure.record import Measured, Run
from ampatch.sweep.report import provenance
from ampatch.sweep.report.figures import first_and_last, status, step_ms
from ampatch.sweep.report.results import Results, read_results, read_runs


class Point(NamedTuple):
    """A value against optimizer steps; `seconds` are those since the script began, if known."""

    tag: str
    step: int
    value: float
    seconds: float | None = None


@dataclass(frozen=True)
class TrackedRun:
    """One run: what it was to do, what came of it, and each value that it gave."""

    run: Run

    @property
    def status(self) -> str:
        return status(self.run)

    @property
    def points(self) -> Iterator[Point]:
        """`loss`, `loss scale`, `metrics/NAME`, `step ms`, `skipped`; other losses: `loss/ID`."""
        measured = self.run.measured or Measured()
        tables = (("loss", measured.losses), ("loss scale", measured.loss_scales))
        series = {
            tag if loss_id == "0" else f"{tag}/{loss_id}": one
            for tag, table in tables
            for loss_id, one in table.items()
        }
        series |= {f"metrics/{name}": one for name, one in measured.metrics.items()}
        for tag, one in series.items():
            seconds = one.seconds or [None] * len(one.values)
            yield from map(Point, [tag] * len(one.values), one.steps, one.values, seconds)
        for step, duration in enumerate(measured.step_seconds):
            if duration is not None:
                yield Point("step ms", step, duration * 1000)
        for step, skipped in enumerate(measured.skipped):
            yield Point("skipped", step, float(skipped))

    @property
    def settings(self) -> dict[str, Any]:
        """What the run was to do."""
        trial = self.run.trial
        return {
            "opt_level": trial.case.opt_level,
            "dtype": trial.case.dtype or "float32",
            "engine": trial.case.engine,
            "settings": json.dumps(dict(trial.case.settings), default=str),
            "seed": trial.seed,
            "repeat": trial.repeat,
        }

    @property
    def figures(self) -> dict[str, float]:
        """What came of the run, as numbers; those that it did not measure are left out."""
        measured = self.run.measured or Measured()
        found = {
            "final/loss": first_and_last(measured)[1],
            "final/step ms": step_ms(measured),
            "final/memory MiB": measured.memory_bytes and measured.memory_bytes / 2**20,
            "final/seconds": self.run.seconds,
            **{f"final/{name}": series.values[-1] for name, series in measured.metrics.items()},
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class TrackedSweep:
    """A sweep and its whole runs."""

    directory: Path
    results: Results
    runs: list[TrackedRun]

    @classmethod
    def of(cls, directory: str | Path) -> TrackedSweep:
        """What lies in a sweep's directory.  Raises `FileNotFoundError` if there is no sweep."""
        path = Path(directory)
        results = read_results(path)
        if results is None:
            raise FileNotFoundError(f"{path}: there are no results of a sweep in this directory.")
        whole = (run for run in read_runs(path) if not run.trial.short)
        return cls(path, results, list(map(TrackedRun, whole)))

    @property
    def name(self) -> str:
        """Tells it from other sweeps of the script."""
        return f"{provenance.title(self.results)} {self.results.started}"

    @property
    def began(self) -> float:
        """Seconds since the epoch."""
        return datetime.fromisoformat(self.results.started).timestamp()
