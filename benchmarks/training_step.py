"""Time of a training step, and of an evaluation, relative to torch.autocast + GradScaler.

    python benchmarks/training_step.py [--tables training,evaluation,compute] [--rounds 31]
        [--out FILE.md]

Side by side on one thread: every system in a process of its own, in turns.  What
is given is the median and the quartiles of the ratios within a round.  The
reference is measured twice; believe a ratio only where `autocast again` is within
0.03 of 1.  CPU time of the process for dispatch-bound steps, so that other work on
the machine counts less.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import COMPUTE_BOUND, DISPATCH_BOUND
from systems import AUTOCAST, FP32, SYSTEMS, make_evaluation, make_step
from workers import machine, measure, ratios

TABLES = {
    "training": ("Training, ordinary optimizer, dispatch-bound", DISPATCH_BOUND, "ordinary"),
    "hooks": ("Training with a hook on every parameter", DISPATCH_BOUND, "ordinary"),
    "fused": ("Training, fused optimizer, dispatch-bound", DISPATCH_BOUND, "fused"),
    "evaluation": ("Evaluation under no_grad, dispatch-bound", DISPATCH_BOUND, "evaluation"),
    "compute": ("Training, compute-bound", COMPUTE_BOUND, "ordinary"),
}
OF_TABLE = {
    "hooks": [f"{AUTOCAST} hooks", "autocast again hooks", "O1 hooks"],
    # torch's fused SGD leaves half weights on the CPU as they are.
    "fused": [AUTOCAST, "autocast again", FP32, "O1", "O2"],
}


def make(name: str, kind: str, dtype: str, system: str) -> Callable[[], None]:
    """The function that does one step of a model under a system."""
    torch.manual_seed(0)
    task = {**DISPATCH_BOUND, **COMPUTE_BOUND}[name]()
    if kind == "evaluation":
        return make_evaluation(task, system, getattr(torch, dtype))
    return make_step(task, system, kind, getattr(torch, dtype))


def table(which: str, options: argparse.Namespace) -> str:
    """One table, in Markdown: a row per model, and the geometric means."""
    title, models, kind = TABLES[which]
    systems = OF_TABLE.get(which, SYSTEMS)
    lines = [f"### {title}", "", "| | " + " | ".join(systems) + " |"]
    lines.append("|---" * (len(systems) + 1) + "|")
    medians: dict[str, list[float]] = {system: [] for system in systems}
    for name in models:
        steps = max(1, round(options.seconds / _seconds_of_a_step(name, kind, options.dtype)))
        times = measure(
            functools.partial(make, name, kind, options.dtype),
            systems,
            rounds=options.rounds,
            steps=steps,
            warm_up=max(3, steps),
            threads=1,
            clock=time.process_time,
        )
        cells = []
        for system, (low, middle, high) in ratios(times, systems[0]).items():
            medians[system].append(middle)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    means = [f"**{_geometric_mean(medians[system]):.3f}**" for system in systems]
    lines.append("| **geometric mean** | " + " | ".join(means) + " |")
    return "\n".join(lines) + "\n"


def _seconds_of_a_step(name: str, kind: str, dtype: str) -> float:
    times = measure(
        functools.partial(make, name, kind, dtype),
        [AUTOCAST],
        rounds=3,
        steps=2,
        warm_up=2,
        threads=1,
        clock=time.process_time,
    )
    return min(times[AUTOCAST])


def _geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each system's turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    head = (
        f"# Time per step relative to autocast + GradScaler\n\n{options.dtype}, CPU, one thread: "
        f"median and quartiles of {options.rounds} interleaved rounds, {options.seconds} s per "
        f"turn. SGD, dynamic loss scaling wherever there is one, static 1 at O3.\n{machine()}.\n"
    )
    parts = [head, *(table(which, options) for which in options.tables.split(","))]
    print("\n".join(parts))
    if options.out is not None:
        options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
