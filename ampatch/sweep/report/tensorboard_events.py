"""A sweep's runs as TensorBoard event files: `tensorboard --logdir DIR/tensorboard`.

One directory for each run, named like its other files; `scalars.py` has the series.
"""

from __future__ import annotations

from pathlib import Path

from ampatch.sweep.report import provenance
from ampatch.sweep.report.results import EVENTS
from ampatch.sweep.report.scalars import scalars, tracked

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


def write_events(directory: str | Path) -> str:
    """Write the event files of all whole runs; earlier ones are replaced.

    Returns where they are.  Raises `ImportError` if tensorboard is missing,
    `FileNotFoundError` if there is no sweep.
    """
    check()
    from torch.utils.tensorboard import SummaryWriter

    sweep = tracked(directory)
    origin = "\n".join(f"- {line}" for line in provenance.lines(sweep.results))
    for run in sweep.runs:
        place = sweep.directory / EVENTS / run.trial.file_stem
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(place)) as writer:
            writer.add_text("where the figures come from", origin)
            for tag, series in scalars(run):
                for index, (step, value) in enumerate(zip(series.steps, series.values)):
                    seconds = series.seconds[index] if series.seconds else None
                    time = None if seconds is None else sweep.began + seconds
                    writer.add_scalar(tag, value, step, walltime=time)
    return f"TensorBoard: tensorboard --logdir {sweep.directory / EVENTS}"
