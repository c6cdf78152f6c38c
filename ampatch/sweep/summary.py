"""The figures of a table row, computed from what a run measured.

* Step time: the median time from the end of one optimizer step to the end of
  the next, so forward, backward, step and loading of data together.  Left out
  are the first steps (`WARM_UP`, or a quarter of a short run) and the first
  step after `log_metrics`, which contains an evaluation.  A script that
  evaluates without `log_metrics` does it in few of its steps, and the median
  does not move.  With several optimizers it is the one that steps most often.
* First and last loss: means over the first and the last twentieth of all
  losses given to `scale_loss`; with several losses, those of the lowest `loss_id`.
* A run has diverged when its last loss is not finite, or an earlier one was not
  and the optimizer step after it was taken nevertheless.  An overflow that the
  loss scaler skipped is not divergence.
"""

from __future__ import annotations

import itertools
import math
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from ampatch.sweep.record import Measured, Run, Series

WARM_UP = 10  # steps
SHARE = 20  # first and last loss are means over this fraction of them: 1/20

OK = "ok"


@dataclass(frozen=True)
class Summary:
    """One row.  None stands for what the run did not get to measure."""

    opt_level: str
    dtype: str
    status: str
    step_ms: float | None = None
    speed: float | None = None  # relative to O0; above 1 is faster
    memory_bytes: int | None = None
    memory_kind: str = "resident"
    first_loss: float | None = None
    last_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # the last value of each
    steps: int = 0
    skipped: int = 0
    loss_scale: float | None = None
    seconds: float = 0.0  # of the whole process


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """A row per run, in the order given; speed is relative to the first O0."""
    times = [step_ms(run.measured) for run in runs]
    base = next((ms for run, ms in zip(runs, times) if run.case.opt_level == "O0"), None)
    return [_summary(run, ms, base) for run, ms in zip(runs, times)]


def _summary(run: Run, ms: float | None, base: float | None) -> Summary:
    measured = run.measured or Measured()
    first, last = first_and_last(measured)
    return Summary(
        opt_level=run.case.opt_level,
        dtype=run.case.dtype or "float32",
        status=status(run),
        step_ms=ms,
        speed=base / ms if base and ms else None,
        memory_bytes=measured.memory_bytes,
        memory_kind=measured.memory_kind,
        first_loss=first,
        last_loss=last,
        metrics={name: series.values[-1] for name, series in measured.metrics.items()},
        steps=len(measured.skipped),
        skipped=sum(measured.skipped),
        loss_scale=measured.loss_scale,
        seconds=run.seconds,
    )


def step_ms(measured: Measured | None) -> float | None:
    """The median step time in milliseconds."""
    seconds = [] if measured is None else measured.step_seconds
    timed = [value for value in seconds if value is not None]
    timed = timed[min(WARM_UP, len(timed) // 4) :]
    return statistics.median(timed) * 1000 if timed else None


def first_and_last(measured: Measured) -> tuple[float | None, float | None]:
    """The loss at the start and at the end."""
    losses = _main_losses(measured).values
    if not losses:
        return None, None
    count = max(1, len(losses) // SHARE)
    return statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])


def status(run: Run) -> str:
    """How the run went: "ok", or a word or two on what is wrong, a colon, and the details."""
    if run.ended_by:
        return run.ended_by
    measured = run.measured
    if measured is None:
        return _without_record(run.exit_code)
    if measured.error:
        return f"crashed: {measured.error}"
    if run.exit_code:
        return f"exited: code {run.exit_code}"
    if measured.opt_level is None:
        return "no training: never calls ampatch.initialize"
    if measured.properties.get("enabled") == "False":
        return "no training: calls ampatch.initialize with enabled=False"
    if not measured.skipped:
        return "no training: never steps an optimizer given to ampatch.initialize"
    if measured.opt_level != run.case.opt_level:
        return f"other level: ran at {measured.opt_level}, not at {run.case.opt_level}"
    return divergence(measured) or OK


def divergence(measured: Measured) -> str:
    """Where the loss stopped being a number, or ""."""
    for losses in measured.losses.values():
        harmful = _taken(measured, losses) + _trailing(losses)
        if harmful:
            step, value = min(harmful)
            return f"diverged: loss {value} at step {step + 1}"
    return ""


def _taken(measured: Measured, losses: Series) -> list[tuple[int, float]]:
    """The non-finite losses whose optimizer step was taken."""
    skipped = measured.skipped
    return [
        (step, value)
        for step, value in zip(losses.steps, losses.values)
        if not math.isfinite(value) and step < len(skipped) and not skipped[step]
    ]


def _trailing(losses: Series) -> list[tuple[int, float]]:
    """The non-finite losses that no finite one came after."""
    every = reversed(list(zip(losses.steps, losses.values)))
    return list(itertools.takewhile(lambda pair: not math.isfinite(pair[1]), every))


def _main_losses(measured: Measured) -> Series:
    if not measured.losses:
        return Series()
    return measured.losses[min(measured.losses, key=lambda loss_id: (len(loss_id), loss_id))]


def _without_record(exit_code: int) -> str:
    if exit_code >= 0:
        return f"no record: ended with code {exit_code} before anything was recorded"
    name = signal.Signals(-exit_code).name
    return f"killed: by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
