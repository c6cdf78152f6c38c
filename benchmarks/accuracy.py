"""Is the accuracy the same?  O0 to O3, float16 and bfloat16, beside torch.autocast.

    OMP_NUM_THREADS=1 python benchmarks/run.py accuracy --out docs/accuracy.md

Trains four small tasks (accuracy_tasks.py) with several seeds each, holds every
row's metric against O0's (Welch's t-test), and writes one page (accuracy_page.md).
It takes about six minutes of a core's time, most of it for float16 convolutions.
"""

from __future__ import annotations

import contextlib
import math
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

import measuring
import torch
from accuracy_tasks import TASKS, Task
from scipy.stats import ttest_ind
from systems import AUTOCAST, OURS, How, make_step
from tasks import Task as Trained

import ampatch as amp

PAGE = Path(__file__).with_name("accuracy_page.md")
ADAM_EPS = 1e-8  # torch's default
LEVEL = 0.05


@dataclass(frozen=True)
class Row:
    """A line of the table: who trains, in which half dtype, with which eps of Adam."""

    system: str  # "O0" to "O3", or "autocast"
    dtype: str = "float16"
    eps: float = ADAM_EPS

    @property
    def title(self) -> str:
        """`"O3 float16, eps=0.001"`."""
        if self.system == "O0":
            return "O0"
        peer = "torch.autocast" if self.system == AUTOCAST else self.system
        scaler = " + GradScaler" if peer != self.system and self.dtype == "float16" else ""
        return f"{peer} {self.dtype}{scaler}" + (f", eps={self.eps:g}" * (self.eps != ADAM_EPS))


def rows_of(task: Task) -> list[Row]:
    """O0 first, which the others are compared with."""
    rows = [Row("O0")]
    for dtype in ("float16", "bfloat16"):
        rows += [Row(system, dtype) for system in ("O1", "O2", "O3", AUTOCAST)]
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
    run, dtype = task.make(seed, row.eps), getattr(torch, row.dtype)
    losses: list[float] = []
    stepped: list[object] = []
    run.optimizer.register_step_post_hook(lambda *args: stepped.append(args))

    def loss_of(modules: list) -> torch.Tensor:
        inputs, targets = next(run.batches)
        loss = run.loss(modules[0](inputs), targets)
        losses.append(loss.item())
        return loss

    how = How(dtype, lambda _: run.optimizer, always_scaled=False)
    try:
        step = make_step(Trained([run.model], [loss_of]), row.system, how)
        for number in range(1, (steps or task.steps) + 1):
            step()
            if not math.isfinite(losses[-1]):
                return Result(math.nan, number - len(stepped), diverged_at=number)
        is_ours = row.system in OURS
        with contextlib.nullcontext() if is_ours else torch.autocast("cpu", dtype=dtype):
            return Result(run.metric(), len(losses) - len(stepped))
    finally:
        amp.deactivate()


@dataclass(frozen=True)
class Comparison:
    """Mean of a sample less the reference's, its 95 % interval, and the p-value."""

    difference: float
    low: float
    high: float
    p: float

    @property
    def within_noise(self) -> bool:
        """Whether equal means would give such a difference in 5 % of cases or more."""
        return self.p >= LEVEL


def welch(sample: list[float], reference: list[float]) -> Comparison:
    """Compare two samples, each of two values or more, all finite.

    Samples without any variance differ for certain or not at all.
    """
    difference = mean(sample) - mean(reference)
    if len({*sample}) == len({*reference}) == 1:
        return Comparison(difference, difference, difference, float(difference == 0))
    test = ttest_ind(sample, reference, equal_var=False)
    interval = test.confidence_interval(1 - LEVEL)
    return Comparison(difference, *map(float, (interval.low, interval.high, test.pvalue)))


@dataclass(frozen=True)
class Line:
    """A row's results over all seeds, and their comparison with O0's."""

    row: Row
    results: list[Result]
    against_o0: Comparison | None  # None for O0, and where fewer than two runs are left

    @property
    def metrics(self) -> list[float]:
        """Of the runs that did not diverge."""
        return finite(self.results)


def finite(results: list[Result]) -> list[float]:
    """The metrics of the runs that did not diverge."""
    return [result.metric for result in results if result.diverged_at is None]


def measure(task: Task, seeds: int, steps: int | None = None) -> list[Line]:
    """Every row of `task` with seeds 0, 1, ...; tells on stderr how far it is."""
    lines: list[Line] = []
    for row in rows_of(task):
        results = [train(task, row, seed, steps) for seed in range(seeds)]
        samples = finite(results), (lines[0].metrics if lines else [])
        comparable = min(map(len, samples)) >= 2
        lines.append(Line(row, results, welch(*samples) if comparable else None))
        print(f"{task.title}: {row.title} done", file=sys.stderr, flush=True)
    return lines


def verdict(task: Task, line: Line) -> str:
    """What the last column says."""
    if line.row.system == "O0":
        return "reference"
    steps = [result.diverged_at for result in line.results if result.diverged_at]
    said = []
    if steps:
        first, last = min(steps), max(steps)
        at = f"step {first}" if first == last else f"steps {first} to {last}"
        said.append(f"diverged in {len(steps)} of {len(line.results)} runs, at {at}")
    if line.against_o0 is None:
        said += [] if steps else ["one seed: no test"]
    elif line.against_o0.within_noise:
        said.append("within seed noise")
    else:
        better = (line.against_o0.difference > 0) == task.higher_is_better
        said.append("better" if better else "worse")
    return "; ".join(said)


def table(task: Task, lines: list[Line], steps: int) -> str:
    """One task's table, in Markdown."""
    head = [task.metric, "mean", "s.d.", "n", "less O0 (95 % interval)", "p", "verdict", "skipped"]
    rows = []
    for line in lines:
        n, places, test = len(line.metrics), task.places, line.against_o0
        signed = f"+.{places}f"
        cells = [
            f"{mean(line.metrics):.{places}f}" if n else "",
            f"{stdev(line.metrics):.{places}f}" if n > 1 else "",
            n,
            f"{test.difference:{signed}} ({test.low:{signed}} to {test.high:{signed}})"
            if test
            else "",
            f"{test.p:.3f}" if test else "",
            verdict(task, line),
            f"{sum(result.skipped for result in line.results)} of "
            f"{sum(result.diverged_at or steps for result in line.results)}",
        ]
        rows.append([line.row.title, *cells])
    return measuring.table(head, rows)


def summary(lines: list[Line]) -> str:
    """How many comparisons differ, beside how many would by chance."""
    comparisons = [line.against_o0 for line in lines if line.against_o0]
    differing = [comparison for comparison in comparisons if not comparison.within_noise]
    surviving = [comparison for comparison in differing if comparison.p < LEVEL / len(comparisons)]
    diverged = [line.row.title for line in lines if not line.metrics]
    return (
        f"Comparisons with O0: {len(comparisons)}. Different at the 5 % level: {len(differing)} "
        f"({len(comparisons) / 20:.1f} would be by chance alone). Different after Bonferroni's "
        f"correction: {len(surviving)}. Rows without a result, because all runs diverged: "
        f"{len(diverged)} ({', '.join(sorted(set(diverged))) or 'none'})."
    )


def report(options: Namespace) -> Iterator[str]:
    """The whole page."""
    parts, every_line = [], []
    for task in [TASKS[name] for name in options.tasks or TASKS]:
        lines, steps = measure(task, options.seeds, options.steps), options.steps or task.steps
        every_line += lines
        rows = table(task, lines, steps)
        parts.append(f"### {task.title}, {steps} steps\n\n{task.about}\n\n{rows}")
    yield PAGE.read_text(encoding="utf-8").format(
        command=measuring.command(),
        machine=measuring.machine(),
        capability=torch.backends.cpu.get_cpu_capability(),
        ampatch=amp.__version__,
        sklearn=version("scikit-learn"),
        numpy=version("numpy"),
        seeds=options.seeds,
        summary=textwrap.fill(summary(every_line), 100),
        tables="\n".join(parts).rstrip(),
    )
