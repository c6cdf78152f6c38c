"""What a sweep shows while it runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol, TextIO

from ampatch.sweep.figures import status, step_ms
from ampatch.sweep.record import Planned, Run


class Progress(Protocol):
    """Told by the sweep what happens.  Used as a context manager around it."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *exception: object) -> None: ...

    def started(self, number: int, count: int, planned: Planned) -> None: ...

    def reached(self, steps: int, loss: float | None) -> None: ...

    def ended(self, run: Run) -> None: ...


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def started(self, number: int, count: int, planned: Planned) -> None:
        pass

    def reached(self, steps: int, loss: float | None) -> None:
        pass

    def ended(self, run: Run) -> None:
        pass


class Lines(Silent):
    """A line when a run starts and one when it has ended, for pipes and files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = ""

    def started(self, number: int, count: int, planned: Planned) -> None:
        self._name = f"[{number}/{count}] {planned.label}"
        self._say("started")

    def ended(self, run: Run) -> None:
        self._say(outcome(run))

    def _say(self, text: str) -> None:
        print(f"{self._name}: {text}", file=self._stream, flush=True)


class Live:
    """One line with a bar that moves, and a line above it for each run that ended.

    How many steps a run takes is known from the first one on.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.completed:.0f} steps{task.fields[loss]}"),
            progress.TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task: Any = None
        self._name = ""
        self._total: int | None = None

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def started(self, number: int, count: int, planned: Planned) -> None:
        self._name = f"({number}/{count}) {planned.label}"
        self._task = self._bar.add_task(self._name, total=self._total, loss="")

    def reached(self, steps: int, loss: float | None) -> None:
        text = "" if loss is None else f"  loss {loss:.4f}"
        self._bar.update(self._task, completed=steps, loss=text)

    def ended(self, run: Run) -> None:
        self._bar.remove_task(self._task)
        self._bar.console.print(f"{self._name}: {outcome(run)}", markup=False, highlight=False)
        if self._total is None and run.measured is not None:
            self._total = len(run.measured.skipped) or None


def progress_on(stream: TextIO) -> Progress:
    """The progress display that suits `stream`."""
    if stream.isatty() and importlib.util.find_spec("rich"):
        return Live(stream)
    return Lines(stream)


def outcome(run: Run) -> str:
    """How a run went, in one line: `ok, 230 steps of 4.1 ms in 3.2 s`."""
    steps = len(run.measured.skipped) if run.measured else 0
    ms = step_ms(run.measured)
    each = f" of {ms:.2f} ms" if ms is not None else ""
    return f"{status(run)}, {steps} steps{each} in {run.seconds:.1f} s"
