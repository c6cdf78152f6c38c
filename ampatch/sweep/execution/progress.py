"""The progress display of a sweep: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ampatch.sweep.execution.time_left import TimeLeft
from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.figures import brief, status, step_ms
from ampatch.sweep.trial import Trial

if TYPE_CHECKING:
    from typing_extensions import Self

OTHER_COLUMNS = 57  # of the live line: bar, steps, loss and time at their widest


class Progress(Protocol):
    """What the sweep calls while it runs, inside a `with` block of this object.

    A display derives from it and overrides what it shows; by default nothing is shown.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """The sweep has ended or was interrupted."""

    def started(self, number: int, count: int, trial: Trial, short_later: int = 0) -> None:
        """A trial starts, as the one with this `number` (from 1) of `count`.

        Of the trials after it `short_later` are short.
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
        self._left = TimeLeft()

    def started(self, number: int, count: int, trial: Trial, short_later: int = 0) -> None:
        self._names[trial] = f"[{number}/{count}] {trial.label}"
        self._left.started(number, count, trial.short, short_later, trial)
        self._say(trial, ", about ".join(filter(None, ("started", self._left.text()))))

    def ended(self, run: Run) -> None:
        self._left.ended(run.trial)
        self._say(run.trial, outcome(run))

    def lost(self, trial: Trial, reason: str) -> None:
        self._say(trial, f"lost: {reason}")

    def said(self, text: str) -> None:
        print(f"Note: {text}", file=self._stream, flush=True)

    def _say(self, trial: Trial, text: str) -> None:
        name = self._names.get(trial, trial.label)
        print(f"{name}: {text}", file=self._stream, flush=True)


class Live(Progress):
    """A line with a moving bar for each running trial, and one above them for each that ended.

    The line shows level, dtype and seed, the step, the loss, and the time left.  The
    number of steps of a run is known after the first run.
    """

    def __init__(self, stream: TextIO, steps: int | None = None) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        def text(form: str) -> Any:
            return progress.TextColumn(form, table_column=Column(no_wrap=True), markup=False)

        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            text("{task.description}"),
            progress.BarColumn(bar_width=12),
            text("{task.fields[steps]}"),
            text("{task.fields[loss]}"),
            text("{task.fields[left]}"),
            console=Console(file=stream),
            transient=True,
        )
        self._left = TimeLeft()
        self._tasks: dict[Trial, tuple[str, Any]] = {}
        self._total = steps  # of a whole run

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def started(self, number: int, count: int, trial: Trial, short_later: int = 0) -> None:
        name = f"({number}/{count}) {trial.label}"
        self._left.started(number, count, trial.short, short_later, trial)
        shown = shortened(name, self._bar.console.width - OTHER_COLUMNS)
        expected = self._expected(trial)
        task = self._bar.add_task(shown, total=expected, **self._fields(trial, 0, None))
        self._tasks[trial] = name, task

    def reached(self, trial: Trial, steps: int, loss: float | None) -> None:
        _, task = self._tasks[trial]
        self._bar.update(task, completed=steps, **self._fields(trial, steps, loss))

    def ended(self, run: Run) -> None:
        self._left.ended(run.trial)
        self._finish(run.trial, outcome(run))
        if self._total is None and run.measured is not None:
            self._total = len(run.measured.skipped) or None

    def lost(self, trial: Trial, reason: str) -> None:
        self._finish(trial, f"lost: {reason}")

    def said(self, text: str) -> None:
        self._bar.console.print(f"Note: {text}", markup=False, highlight=False)

    def _finish(self, trial: Trial, text: str) -> None:
        name, task = self._tasks.pop(trial, (trial.label, None))
        if task is not None:
            self._bar.remove_task(task)
        self._bar.console.print(f"{name}: {text}", markup=False, highlight=False)

    def _expected(self, trial: Trial) -> int | None:
        """The steps of the trial, if they are known."""
        return None if trial.short else self._total

    def _fields(self, trial: Trial, steps: int, loss: float | None) -> dict[str, str]:
        expected = self._expected(trial)
        share = steps / expected if expected else None
        return {
            "steps": f"step {steps}" + (f"/{expected}" if expected else ""),
            "loss": "" if loss is None else f"loss {loss:.4g}",
            "left": self._left.text(share, trial),
        }


def progress_on(stream: TextIO, steps: int | None = None) -> Progress:
    """The progress display for `stream`; `steps` is the number of steps of a run, if known."""
    if stream.isatty() and importlib.util.find_spec("rich"):
        return Live(stream, steps)
    return Lines(stream)


def shortened(name: str, room: int) -> str:
    """`name`, or its two ends (the seed among them) if `room` columns are too few for it."""
    if len(name) <= room or room < 16:
        return name
    return f"{name[: room - 9]}…{name[-8:]}"


def outcome(run: Run) -> str:
    """How a run went, in one line and without details: `ok, 230 steps of 4.1 ms in 3.2 s`."""
    steps = len(run.measured.skipped) if run.measured else 0
    ms = step_ms(run.measured)
    each = f" of {ms:.2f} ms" if ms is not None else ""
    return f"{brief(status(run))}, {steps} steps{each} in {run.seconds:.1f} s"
