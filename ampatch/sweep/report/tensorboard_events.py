"""A sweep's runs as TensorBoard event files: `tensorboard --logdir DIR/tensorboard`.

One directory for each run, named like its other files; scalars `loss`, `loss scale`, `step ms`,
`skipped` and `metrics/NAME` against optimizer steps.  Further losses are `loss/LOSS_ID`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from ampatch.sweep.measure.record import Measured, Series
from ampatch.sweep.report.results import EVENTS, read_results, read_runs

MISSING = (
    "TensorBoard's event files need tensorboard, which is not installed. Do pip install "
    "tensorboard, or leave --tensorboard out."
)


def check() -> None:
    """Raise `ImportError` if tensorboard is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error


def write_events(directory: str | Path) -> None:
    """Write the event files of all whole runs in a sweep's directory; earlier ones are replaced.

    Raises `ImportError` if tensorboard is missing, `FileNotFoundError` if there is no sweep.
    """
    check()
    from torch.utils.tensorboard import SummaryWriter

    path = Path(directory)
    results = read_results(path)
    if results is None:
        raise FileNotFoundError(f"{path}: there are no results of a sweep in this directory.")
    began = datetime.datetime.fromisoformat(results.started).timestamp()
    for run in (run for run in read_runs(path) if not run.trial.short):
        place = path / EVENTS / run.trial.file_stem
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(place)) as writer:
            for tag, series in _scalars(run.measured or Measured()):
                for index, (step, value) in enumerate(zip(series.steps, series.values)):
                    seconds = series.seconds[index] if series.seconds else None
                    time = None if seconds is None else began + seconds
                    writer.add_scalar(tag, value, step, walltime=time)


def _scalars(measured: Measured) -> Iterator[tuple[str, Series]]:
    for tag, table in (("loss", measured.losses), ("loss scale", measured.loss_scales)):
        for loss_id, series in table.items():
            yield (tag if loss_id == "0" else f"{tag}/{loss_id}"), series
    for name, series in measured.metrics.items():
        yield f"metrics/{name}", series
    times = [(n, s * 1000) for n, s in enumerate(measured.step_seconds) if s is not None]
    yield "step ms", Series([n for n, _ in times], [ms for _, ms in times])
    skipped = list(map(float, measured.skipped))
    yield "skipped", Series(list(range(len(skipped))), skipped)
