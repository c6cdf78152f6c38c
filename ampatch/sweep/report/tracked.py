"""A sweep's whole runs as experiment trackers take them: points, settings and figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ampatch.sweep.measure.record import Measured, Run
from ampatch.sweep.report.figures import first_and_last, status, step_ms


class Point(NamedTuple):
    """A value against optimizer steps; `seconds` are those since the script began, if known."""

    tag: str
    step: int
    value: float
    seconds: float | None = None


def whole(runs: Iterable[Run]) -> list[TrackedRun]:
    """The runs without the short ones, which are there for their timing alone."""
    return [TrackedRun(run) for run in runs if not run.trial.short]


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
