"""One training run of a task: by ampatch at an opt level, or by torch.autocast."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from accuracy_tasks import Run, Task

import ampatch as amp

ADAM_EPS = 1e-8  # torch's default


@dataclass(frozen=True)
class Row:
    """A line of the table: who trains, in which half type, with which eps of Adam."""

    engine: str  # "O0" to "O3", or "autocast"
    dtype: str = "float16"
    eps: float = ADAM_EPS

    @property
    def title(self) -> str:
        """`"O3 float16, eps=0.001"`."""
        if self.engine == "O0":
            return "O0"
        peer = "torch.autocast" if self.engine == "autocast" else self.engine
        scaler = " + GradScaler" if peer != self.engine and self.dtype == "float16" else ""
        return f"{peer} {self.dtype}{scaler}" + (f", eps={self.eps:g}" * (self.eps != ADAM_EPS))


def rows_of(task: Task) -> list[Row]:
    """O0 first, which the others are compared with."""
    rows = [Row("O0")]
    for dtype in ("float16", "bfloat16"):
        rows += [Row(engine, dtype) for engine in ("O1", "O2", "O3", "autocast")]
    if task.uses_adam:
        rows.insert(4, Row("O3", eps=1e-3))
    return rows


@dataclass(frozen=True)
class Result:
    """What a run came to; `metric` is NaN where it diverged."""

    metric: float
    skipped: int
    diverged_at: int | None = None  # the step, counted from 1, whose loss was not finite


def train(task: Task, row: Row, seed: int, steps: int | None = None) -> Result:
    """Train `task` from scratch; ends at the first loss that is not finite."""
    run = task.make(seed, row.eps)
    engine = (Autocast if row.engine == "autocast" else Ampatch)(run, row)
    try:
        for number in range(1, (steps or task.steps) + 1):
            run.model.train()
            if not math.isfinite(engine.step(*next(run.batches))):
                return Result(math.nan, engine.skipped, diverged_at=number)
        with engine.casts():
            return Result(run.metric(), engine.skipped)
    finally:
        engine.close()


class Ampatch:
    """`initialize` and `scale_loss`, with every setting as the opt level has it."""

    def __init__(self, run: Run, row: Row) -> None:
        self.run = run
        amp.initialize(run.model, run.optimizer, opt_level=row.engine, dtype=row.dtype, verbosity=0)

    casts = staticmethod(contextlib.nullcontext)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One training step; returns its loss."""
        self.run.optimizer.zero_grad()
        loss = self.run.loss(self.run.model(inputs), targets)
        with amp.scale_loss(loss, self.run.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.run.optimizer.step()
        return loss.item()

    @property
    def skipped(self) -> int:
        """Steps skipped because of an overflow."""
        return amp.step_counts(self.run.optimizer).skipped

    def close(self) -> None:
        """Torch as it was."""
        amp.deactivate()


class Autocast:
    """The recipe of torch's documentation; a GradScaler in float16 only."""

    def __init__(self, run: Run, row: Row) -> None:
        self.run = run
        self.dtype = getattr(torch, row.dtype)
        self.scaler = torch.amp.GradScaler("cpu", enabled=row.dtype == "float16")
        self.skipped = 0

    def casts(self) -> torch.autocast:
        """The context that forward passes run in."""
        return torch.autocast("cpu", dtype=self.dtype)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One training step; returns its loss."""
        self.run.optimizer.zero_grad()
        with self.casts():
            loss = self.run.loss(self.run.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.run.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        return loss.item()

    def close(self) -> None:
        """Nothing to undo."""
