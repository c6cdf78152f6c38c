"""Is the accuracy the same?  O0 to O3, float16 and bfloat16, beside torch.autocast.

    OMP_NUM_THREADS=1 python benchmarks/accuracy.py --out docs/accuracy.md

Trains four small tasks (accuracy_tasks.py) with several seeds each, holds every
row's metric against O0's (seed_noise.py), adds two constructed tasks whose
results are known beforehand (why_the_parts_exist.py), and writes one page.
It takes about six minutes of a core's time, most of it for float16 convolutions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import accuracy_page
import torch
from accuracy_runs import Result, Row, rows_of, train
from accuracy_tasks import TASKS, Task
from seed_noise import Comparison, welch
from workers import machine


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
    if line.row.engine == "O0":
        return "reference"
    steps = [result.diverged_at for result in line.results if result.diverged_at]
    said = []
    if steps:
        first, last = min(steps), max(steps)
        at = f"step {first}" if first == last else f"steps {first} to {last}"
        said.append(f"diverged in {len(steps)} of {len(line.results)} runs, at {at}")
    if line.against_o0 is None:
        said.append("" if steps else "one seed: no test")
    elif line.against_o0.within_noise:
        said.append("within seed noise")
    else:
        better = (line.against_o0.difference > 0) == task.higher_is_better
        said.append("better" if better else "worse")
    return "; ".join(filter(None, said))


def table(task: Task, lines: list[Line], steps: int) -> str:
    """One task's table, in Markdown."""
    found = [
        f"| {task.metric} | mean | s.d. | n | less O0 (95 % interval) | p | verdict | skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        skipped = sum(result.skipped for result in line.results)
        cells = [
            line.row.title,
            *_mean_and_deviation(line.metrics, task.places),
            str(len(line.metrics)),
            *_difference(line.against_o0, task.places),
            verdict(task, line),
            f"{skipped} of {sum(result.diverged_at or steps for result in line.results)}",
        ]
        found.append("| " + " | ".join(cells) + " |")
    return "\n".join(found)


def _mean_and_deviation(metrics: list[float], places: int) -> tuple[str, str]:
    mean = f"{statistics.mean(metrics):.{places}f}" if metrics else ""
    deviation = f"{statistics.stdev(metrics):.{places}f}" if len(metrics) > 1 else ""
    return mean, deviation


def _difference(found: Comparison | None, places: int) -> tuple[str, str]:
    if found is None:
        return "", ""
    signed = f"+.{places}f"
    interval = f"({found.low:{signed}} to {found.high:{signed}})"
    return f"{found.difference:{signed}} {interval}", f"{found.p:.3f}"


def summary(lines: list[Line]) -> str:
    """How many comparisons differ, beside how many would by chance."""
    comparisons = [line.against_o0 for line in lines if line.against_o0]
    differing = [one for one in comparisons if not one.within_noise]
    surviving = [one for one in differing if one.p < 0.05 / len(comparisons)]
    diverged = [line.row.title for line in lines if not line.metrics]
    return (
        f"Comparisons with O0: {len(comparisons)}. Different at the 5 % level: {len(differing)} "
        f"({len(comparisons) / 20:.1f} would be by chance alone). Different after Bonferroni's "
        f"correction: {len(surviving)}. Rows without a result, because all runs diverged: "
        f"{len(diverged)} ({', '.join(sorted(set(diverged))) or 'none'})."
    )


def report(names: list[str], seeds: int, steps: int | None, command: str) -> str:
    """Measure, and return the page."""
    tables, every_line = [], []
    for name in names:
        task = TASKS[name]
        lines = measure(task, seeds, steps)
        every_line += lines
        count = steps or task.steps
        tables.append(
            f"### {task.title}, {count} steps\n\n{task.about}\n\n{table(task, lines, count)}"
        )
    return accuracy_page.page(machine(), command, seeds, tables, summary(every_line))


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=8, help="runs per row (default 8)")
    parser.add_argument("--steps", type=int, help="per run, instead of each task's own")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    if options.seeds < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--seeds and --steps must be 1 or more")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: there is no directory {options.out.parent}")
    torch.set_num_threads(1)
    command = " ".join(["python benchmarks/accuracy.py", *sys.argv[1:]])
    text = report(options.tasks, options.seeds, options.steps, command)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
