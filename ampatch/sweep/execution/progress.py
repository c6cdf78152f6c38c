"""The progress display of a sweep: lines, and on a terminal a last one that moves."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from ampatch.sweep.execution.budget import duration
from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.figures import brief, status, step_ms
from ampatch.sweep.trial import Trial


class Progress:
    """What the sweep calls while it runs, inside a `with` block of this object.

    A display derives from it and overrides what it shows; this one shows nothing.
    """

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        """The sweep has ended or was interrupted."""

    def started(self, number: int, count: int, trial: Trial, seconds: float | None = None) -> None:
        """A trial starts, as the one with this `number` (from 1) of `count`; 0: it may change.

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


class Lines(Progress):
    """A line for each run that has ended, and for what is said.

    On a terminal there is one more below them, which moves: the run that has told last how far it
    is, with the time left.  In a pipe or a file there is one for each run that starts.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moves = stream.isatty()
        self._names: dict[Trial, str] = {}
        self._end: float | None = None  # the sweep's end, as far as it is known
        self.shown: list[str] = []

    def __exit__(self, *exception: object) -> None:
        self._write("")

    def started(self, number: int, count: int, trial: Trial, seconds: float | None = None) -> None:
        self._names[trial] = f"[{number}{f'/{count}' if count else ''}] {trial.label}"
        self._end = None if seconds is None else time.monotonic() + seconds
        self._show(trial, "started")

    def reached(self, trial: Trial, steps: int, loss: float | None) -> None:
        if self._moves:
            self._show(trial, f"step {steps}" + ("" if loss is None else f", loss {loss:.4g}"))

    def ended(self, run: Run) -> None:
        self._say(run.trial, outcome(run))

    def lost(self, trial: Trial, reason: str) -> None:
        self._say(trial, f"lost: {reason}")

    def said(self, text: str) -> None:
        self.shown.append(text)
        self._write(f"Note: {text}\n")

    def _show(self, trial: Trial, text: str) -> None:
        if self._end is not None:
            text += f", about {duration(max(0.0, self._end - time.monotonic()))} left"
        line = f"{self._names[trial]}: {text}"
        columns = shutil.get_terminal_size().columns
        self._write(line[1 - columns :] if self._moves else f"{line}\n")

    def _say(self, trial: Trial, text: str) -> None:
        self._write(f"{self._names.get(trial, trial.label)}: {text}\n")

    def _write(self, text: str) -> None:
        """Write in the place of the line that moves."""
        self._stream.write(f"\r\x1b[K{text}" if self._moves else text)
        self._stream.flush()


def outcome(run: Run) -> str:
    """How a run went, in one line and without details: `ok, 230 steps of 4.1 ms in 3.2 s`."""
    ms = step_ms(run.measured)
    each = f" of {ms:.2f} ms" if ms is not None else ""
    return f"{brief(status(run))}, {run.steps} steps{each} in {run.seconds:.1f} s"
