"""The figures of one run.

* Step time: from the end of one optimizer step to the end of the next.  The first `WARM_UP_STEPS`
  (a quarter of the steps of a short run) and the first step after `log_metrics`, which contains an
  evaluation, do not count.  With several optimizers the one that steps most often counts.
* CPU time: that of all threads of the process, from step to step.
* First and last loss: means over the first and the last twentieth of all losses given to
  `scale_loss` or `backward()`; with several losses, of those with the lowest `loss_id`.  If runs
  recorded unequal numbers of losses, every first loss is a mean over the same number of losses, a
  twentieth of those of the shortest run.
* A run has diverged if its last loss is not finite, or if an earlier loss was not finite and the
  optimizer step after it was taken.  An overflow whose step was skipped is not a divergence.
"""

from __future__ import annotations

import itertools
import math
import signal
import statistics
from collections.abc import Sequence

from ampatch.sweep.measure.run_record import Measured, Run, Series
from ampatch.sweep.report.numbers import mean
from ampatch.sweep.report.results import Spread
from ampatch.sweep.trial import BASE

WARM_UP_STEPS = 10
LOSS_WINDOW_DIVISOR = 20  # first and last loss are means over 1/20 of all losses

OK = "ok"
# Other statuses begin with one of these, or with another short reason, and go on with details:
CRASHED, DIVERGED, NO_STEP, NO_TRAINING = "crashed", "diverged", "took no step", "no training"


def step_times(measured: Measured | None, num_steps: int | None = None) -> Spread | None:
    """Median and quartiles of the step time in milliseconds, of all or the first `num_steps`."""
    seconds = [] if measured is None else measured.step_seconds[:num_steps]
    return spread_of([value * 1000 for value in _timed_steps(seconds)])


def cpu_ms(measured: Measured | None, num_steps: int | None = None) -> float | None:
    """The median CPU time of a step in milliseconds; None if the device is no CPU."""
    timed = _timed_steps([] if measured is None else measured.cpu_seconds[:num_steps])
    return statistics.median(timed) * 1000 if timed else None


def spread_of(values: Sequence[float]) -> Spread | None:
    """Median and quartiles; the least and greatest of three values or fewer; None without values.

    The quartiles are estimates for the distribution, limited to the range of the values.
    """
    if not values:
        return None
    least, greatest = min(values), max(values)
    if len(values) == 1:
        return Spread(least, least, least, 1)
    low, median, high = statistics.quantiles(values, n=4, method="exclusive")
    return Spread(median, max(low, least), min(high, greatest), len(values))


def _timed_steps(seconds: Sequence[float | None]) -> list[float]:
    """The seconds of the steps that count: after the warm-up and not after a pause."""
    timed = [value for value in seconds if value is not None]
    return timed[min(WARM_UP_STEPS, len(timed) // 4) :]


def step_ms(measured: Measured | None, num_steps: int | None = None) -> float | None:
    """The median step time in milliseconds, of all or the first `num_steps`."""
    times = step_times(measured, num_steps)
    return None if times is None else times.median


def first_and_last(
    measured: Measured | None, num_losses: int | None = None
) -> tuple[float | None, float | None]:
    """The first loss, a mean over `num_losses` or a twentieth of all losses; and the last loss."""
    losses = main_losses(measured).values
    if not losses:
        return None, None
    count = max(1, len(losses) // LOSS_WINDOW_DIVISOR)
    return mean(losses[: num_losses or count]), mean(losses[-count:])


def main_losses(measured: Measured | None) -> Series:
    """The losses with the lowest `loss_id`; empty if there are none."""
    if measured is None or not measured.losses:
        return Series()
    return measured.losses[min(measured.losses, key=lambda loss_id: (len(loss_id), loss_id))]


def status(run: Run) -> str:
    """The status of a run: "ok", or a short reason, a colon, and details."""
    if run.ended_by:
        return run.ended_by
    measured = run.measured
    if measured is None and run.exit_code < 0:
        return _signal_text(run.exit_code)
    if measured is None:
        return f"no record: ended with code {run.exit_code}, as by os._exit; sys.exit leaves one"
    if measured.error:
        return f"{CRASHED}: {measured.error}"
    if run.exit_code < 0:
        return f"{_signal_text(run.exit_code)} after its record was written"
    if run.exit_code:
        return f"exit status {run.exit_code}"
    if measured.opt_level is None:
        if run.case == BASE:
            return f"{NO_TRAINING}: never steps an optimizer of torch.optim, nor calls initialize"
        return f"{NO_TRAINING}: never calls ampatch.initialize, nor apex.amp's, before a step"
    if measured.properties.get("enabled") == "False":
        return f"{NO_TRAINING}: calls ampatch.initialize with enabled=False"
    if not measured.skipped:
        return f"{NO_STEP}: the optimizer that ampatch.initialize was given never stepped"
    if measured.opt_level != run.case.opt_level:
        return f"other level: ran at {measured.opt_level}, not at {run.case.opt_level}"
    return divergence(measured) or OK


def status_name(status: str) -> str:
    """The status up to the colon, for a cell of a table: `crashed`, `diverged at step 12`."""
    return status.partition(":")[0]


def divergence(measured: Measured) -> str:
    """The step and the loss at which a run diverged, as text; "" if it did not diverge."""
    for losses in measured.losses.values():
        harmful = _nonfinite_with_taken_step(measured, losses) + _nonfinite_at_end(losses)
        if harmful:
            step, value = min(harmful)
            return f"{DIVERGED} at step {step + 1}: loss {value}"
    return ""


def _nonfinite_with_taken_step(measured: Measured, losses: Series) -> list[tuple[int, float]]:
    """The non-finite losses whose optimizer step was taken."""
    skipped = measured.skipped
    return [
        (step, value)
        for step, value in zip(losses.steps, losses.values)
        if not math.isfinite(value) and step < len(skipped) and not skipped[step]
    ]


def _nonfinite_at_end(losses: Series) -> list[tuple[int, float]]:
    """The non-finite losses after the last finite one."""
    latest_first = reversed(list(zip(losses.steps, losses.values)))
    return list(itertools.takewhile(lambda pair: not math.isfinite(pair[1]), latest_first))


def _signal_text(exit_code: int) -> str:
    name = signal.Signals(-exit_code).name
    return f"killed: by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
