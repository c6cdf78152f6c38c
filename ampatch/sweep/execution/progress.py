"""The progress display of a sweep: a line for each run, on a terminal with a changing last line."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from ampatch.sweep.execution.budget import duration_text
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.report.run_figures import status, status_name, step_ms
from ampatch.sweep.trial import Trial


class Progress:
    """The methods that a sweep calls while it runs, inside a `with` block of this object.

    A display derives from this class and overrides methods; this class shows nothing.
    """

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        """The sweep has ended or was interrupted."""

    def started(self, number: int, count: int, trial: Trial, seconds: float | None = None) -> None:
        """A trial starts: `number` (from 1) of `count`, which is 0 if it may change.

        `seconds` is how long this and all later trials take (estimated); None if unknown.
        """

    def reached(self, trial: Trial, steps: int, loss: float | None) -> None:
        """A running trial has taken this number of steps; `loss` is its latest loss, if known."""

    def ended(self, run: Run) -> None:
        """A trial that had started has ended."""

    def lost(self, trial: Trial, reason: str) -> None:
        """A trial will have no run, because its worker died in every attempt."""

    def said(self, text: str) -> None:
        """Show a note to the user."""


class Lines(Progress):
    """Prints a line for each run that has ended, and for each note.

    On a terminal the last line is overwritten with the latest progress of a run and the time left.
    In a pipe or a file there is a line for each run that starts.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._names: dict[Trial, str] = {}
        self._end: float | None = None  # expected end of the sweep, by `time.monotonic`
        self.shown: list[str] = []  # notes

    def __exit__(self, *exception: object) -> None:
        self._write("")

    def started(self, number: int, count: int, trial: Trial, seconds: float | None = None) -> None:
        self._names[trial] = f"[{number}{f'/{count}' if count else ''}] {trial.label}"
        self._end = None if seconds is None else time.monotonic() + seconds
        self._show_progress(trial, "started")

    def reached(self, trial: Trial, steps: int, loss: float | None) -> None:
        if self._is_terminal:
            loss_text = "" if loss is None else f", loss {loss:.4g}"
            self._show_progress(trial, f"step {steps}{loss_text}")

    def ended(self, run: Run) -> None:
        self._write_line(run.trial, run_line(run))

    def lost(self, trial: Trial, reason: str) -> None:
        self._write_line(trial, f"lost: {reason}")

    def said(self, text: str) -> None:
        self.shown.append(text)
        self._write(f"Note: {text}\n")

    def _show_progress(self, trial: Trial, text: str) -> None:
        if self._end is not None:
            text += f", about {duration_text(max(0.0, self._end - time.monotonic()))} left"
        line = f"{self._names[trial]}: {text}"
        columns = shutil.get_terminal_size().columns
        self._write(line[1 - columns :] if self._is_terminal else f"{line}\n")

    def _write_line(self, trial: Trial, text: str) -> None:
        self._write(f"{self._names.get(trial, trial.label)}: {text}\n")

    def _write(self, text: str) -> None:
        """Write `text`, on a terminal over the last line."""
        self._stream.write(f"\r\x1b[K{text}" if self._is_terminal else text)
        self._stream.flush()


def run_line(run: Run) -> str:
    """How a run went, in one line and without details: `ok, 230 steps of 4.1 ms in 3.2 s`."""
    ms = step_ms(run.measured)
    step_time = f" of {ms:.2f} ms" if ms is not None else ""
    return f"{status_name(status(run))}, {run.steps} steps{step_time} in {run.seconds:.1f} s"
