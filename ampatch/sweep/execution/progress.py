"""The progress display of a sweep: moving bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ampatch.sweep.execution.budget import duration
from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.figures import brief, status, step_ms
from ampatch.sweep.trial import Trial

if TYPE_CHECKING:
    from typing_extensions import Self


class Progress(Protocol):
    """What the sweep calls while it runs, inside a `with` block of this object.

    A display derives from it and overrides what it shows; by default nothing is shown.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """The sweep has ended or was interrupted."""

    def started(self, number: int, count: int, trial: Trial, seconds: float | None = None) -> None:
        """A trial starts, as the one with this `number` (from 1) of `count`.

        It and those after it take about so many `seconds`, where that is known.
        """

    def reached(self, trial: Trial, steps: int, loss: float | None) -> None:
        """A running trial has taken so many steps; `loss` is its latest, if known."""

    def ended(self, run: Run) -> None:
        """A trial that had started has ended."""

    def lost(self, trial: Trial, reason: str) -> None:
        """A trial will have no run, since what ran it died again and again."""

    def said(self, text: str) -> None:
        """Something that the user should know before the sweep has ended."""


class Silent(Progress):
    """Shows nothing."""


class Lines(Progress):
    """One line when a run starts and one when it has ended, for pipes and files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._names: dict[Trial, str] = {}

    def started(self, number: int, count: int, trial: Trial, seconds: float | None = None) -> None:
        self._names[trial] = f"[{number}/{count}] {trial.label}"
        left = "" if seconds is None else f", about {duration(seconds)} left"
        self._say(trial, f"started{left}")

    def ended(self, run: Run) -> None:
        self._say(run.trial, outcome(run))

    def lost(self, trial: Trial, reason: str) -> None:
        self._say(trial, f"lost: {reason}")

    def said(self, text: str) -> None:
        print(f"Note: {text}", file=self._stream, flush=True)

    def _say(self, trial: Trial, text: str) -> None:
        name = self._names.get(trial, trial.label)
        print(f"{name}: {text}", file=self._stream, flush=True)


class Live(Progress):
    """Bars of rich: one for the time of the sweep, one for each trial that runs.

    A trial's line shows level, dtype and seed, the step, the loss, and the time left.  The
    number of steps of a run is known after the first run.
    """

    def __init__(self, stream: TextIO, steps: int | None = None) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        self._console = Console(file=stream)
        name = Column(overflow="fold", ratio=1)  # a long one keeps its seed
        self._bars = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False, table_column=name),
            progress.BarColumn(bar_width=12),
            progress.TextColumn("{task.fields[steps]}", markup=False),
            progress.TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            expand=True,
            speed_estimate_period=24 * 3600,
        )
        self._all = self._bars.add_task("all runs", total=None, steps="")
        self._tasks: dict[Trial, Any] = {}
        self._names: dict[Trial, str] = {}
        self._steps = steps  # of a whole run

    def __enter__(self) -> Live:
        self._start = time.monotonic()
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def started(self, number: int, count: int, trial: Trial, seconds: float | None = None) -> None:
        self._names[trial] = f"({number}/{count}) {trial.label}"
        total = None if trial.short else self._steps
        self._tasks[trial] = self._bars.add_task(self._names[trial], total=total, steps="")
        passed = time.monotonic() - self._start
        self._bars.update(
            self._all,
            completed=passed,  # in seconds: what is left then is that of the plan
            total=None if seconds is None else passed + seconds,
            steps=f"{number - 1}/{count} runs",
        )

    def reached(self, trial: Trial, steps: int, loss: float | None) -> None:
        of = "" if trial.short or self._steps is None else f"/{self._steps}"
        shown = f"step {steps}{of}" + ("" if loss is None else f", loss {loss:.4g}")
        self._bars.update(self._tasks[trial], completed=steps, steps=shown)

    def ended(self, run: Run) -> None:
        self._finish(run.trial, outcome(run))
        if self._steps is None and run.measured is not None:
            self._steps = len(run.measured.skipped) or None

    def lost(self, trial: Trial, reason: str) -> None:
        self._finish(trial, f"lost: {reason}")

    def said(self, text: str) -> None:
        self._console.print(f"Note: {text}", markup=False, highlight=False)

    def _finish(self, trial: Trial, text: str) -> None:
        if trial in self._tasks:
            self._bars.remove_task(self._tasks.pop(trial))
        name = self._names.get(trial, trial.label)
        self._console.print(f"{name}: {text}", markup=False, highlight=False)


def progress_on(stream: TextIO, steps: int | None = None) -> Progress:
    """The progress display for `stream`; `steps` is the number of steps of a run, if known."""
    if stream.isatty() and importlib.util.find_spec("rich"):
        return Live(stream, steps)
    return Lines(stream)


def outcome(run: Run) -> str:
    """How a run went, in one line and without details: `ok, 230 steps of 4.1 ms in 3.2 s`."""
    steps = len(run.measured.skipped) if run.measured else 0
    ms = step_ms(run.measured)
    each = f" of {ms:.2f} ms" if ms is not None else ""
    return f"{brief(status(run))}, {steps} steps{each} in {run.seconds:.1f} s"
