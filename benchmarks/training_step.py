"""Speed of a training step, and of an evaluation, beside torch.autocast + GradScaler.

    python benchmarks/training_step.py [--tables training,evaluation,compute] [--rounds 31]
        [--out FILE.md]

Side by side on one thread: every system in a process of its own, in turns.  What
is given is the median and the quartiles of the speed-ups within a round: the reference's time
over the system's, above 1 is faster.  The reference is measured twice; believe a speed-up only
where `autocast again` is within 0.03 of 1.  CPU time of the process for dispatch-bound steps, so
that other work on the machine counts less.  All columns but those called native run with
AMPATCH_NATIVE=0.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from models import COMPUTE_BOUND, DISPATCH_BOUND
from systems import (
    AGAIN,
    AUTOCAST,
    CACHED,
    FP32,
    HALF,
    SYSTEMS,
    environment,
    make_evaluation,
    make_step,
    with_native,
)
from ways_to_train import COMPILER, MICRO_BATCHES, RANKS, ranks
from workers import machine, measure, speed_ups

EVALUATION = "evaluation"
TO_THE_LIMIT = [AUTOCAST, AGAIN, HALF, "O1", "O2"]
NO_NATIVE = "No native part is built here: its columns are left out.\n"


class Table(NamedTuple):
    """What one table measures."""

    title: str
    systems: list[str] = SYSTEMS
    optimizer: str = "ordinary"
    situation: str = "plain"  # a key of `ways_to_train.SITUATIONS`, or EVALUATION
    models: Iterable[str] = tuple(DISPATCH_BOUND)
    clock: Callable[[], float] = time.process_time


DDP = f"Training in DistributedDataParallel, {RANKS} gloo ranks"
TABLES = {
    "training": Table("Training, ordinary optimizer, dispatch-bound"),
    # torch's fused SGD leaves half weights on the CPU as they are.
    "fused": Table(
        "Training, fused optimizer, dispatch-bound",
        [AUTOCAST, AGAIN, FP32, "O1", "O2"],
        optimizer="fused",
    ),
    "hooks": Table("Training with a hook on every parameter", TO_THE_LIMIT, situation="hooks"),
    "accumulation": Table(
        f"Training, {MICRO_BATCHES} micro-batches per step", TO_THE_LIMIT, situation="accumulation"
    ),
    "checkpoint": Table(
        "Training with activation checkpointing of each layer",
        TO_THE_LIMIT,
        situation="checkpoint",
    ),
    "ddp": Table(f"{DDP}: CPU time of rank 0", TO_THE_LIMIT, situation="ddp"),
    "ddp-wall": Table(f"{DDP}: wall time", TO_THE_LIMIT, situation="ddp", clock=time.perf_counter),
    "compile": Table(
        f"Training under torch.compile ({COMPILER})",
        TO_THE_LIMIT,
        situation="compile",
        models=("MLP, 8 layers", "conv net, BatchNorm", "transformer, d=16"),
    ),
    "evaluation": Table(
        "Evaluation under no_grad, dispatch-bound; cached: inside one block of cached_weights",
        [*SYSTEMS, "O1" + CACHED, "O2" + CACHED],
        situation=EVALUATION,
    ),
    "compute": Table("Training, compute-bound", models=tuple(COMPUTE_BOUND)),
}


def make(which: str, name: str, dtype: str, system: str) -> Callable[[], None]:
    """The function that does one step of a table's model under a system."""
    torch.manual_seed(0)
    task = {**DISPATCH_BOUND, **COMPUTE_BOUND}[name]()
    of = TABLES[which]
    if of.situation == EVALUATION:
        return make_evaluation(task, system, getattr(torch, dtype))
    return make_step(task, system, of.optimizer, getattr(torch, dtype), of.situation)


def environments(which: str, system: str) -> list[dict[str, str]]:
    """The environments of a system's processes: several where a table has ranks."""
    processes = ranks() if TABLES[which].situation == "ddp" else [{}]
    return [{**environment(system), **variables} for variables in processes]


def table(which: str, options: argparse.Namespace) -> str:
    """One table, in Markdown: a row per model, and the geometric means."""
    systems = with_native(TABLES[which].systems)
    lines = [f"### {TABLES[which].title}", "", "| | " + " | ".join(systems) + " |"]
    lines.append("|---" * (len(systems) + 1) + "|")
    medians: dict[str, list[float]] = {system: [] for system in systems}
    for name in options.models or TABLES[which].models:
        times = _times(which, name, systems, options)
        cells = []
        for system, (low, middle, high) in speed_ups(times, systems[0]).items():
            medians[system].append(middle)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    means = [f"**{statistics.geometric_mean(medians[system]):.3f}**" for system in systems]
    lines.append("| **geometric mean** | " + " | ".join(means) + " |")
    return "\n".join(lines) + "\n"


def _times(
    which: str, name: str, systems: list[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    run = functools.partial(
        measure,
        functools.partial(make, which, name, options.dtype),
        threads=1,
        clock=TABLES[which].clock,
        environments=functools.partial(environments, which),
    )
    a_step = min(run([AUTOCAST], rounds=3, steps=2, warm_up=2)[AUTOCAST])
    steps = max(1, round(options.seconds / a_step))
    return run(systems, rounds=options.rounds, steps=steps, warm_up=max(3, steps))


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES), help="of these, with commas")
    parser.add_argument("--models", action="append", help="one model; may be given again")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each system's turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    head = (
        f"# Speed of a step beside autocast + GradScaler\n\n{options.dtype}, CPU, one thread: "
        f"median and quartiles of {options.rounds} interleaved rounds, {options.seconds} s per "
        "turn. Above 1 is faster than autocast. SGD, dynamic loss scaling wherever there is one, "
        f"static 1 at O3.\n{machine()}.\n"
    )
    parts = [head, *(table(which, options) for which in options.tables.split(","))]
    if with_native(SYSTEMS) == SYSTEMS:
        parts.insert(1, NO_NATIVE)
    print("\n".join(parts))
    if options.out is not None:
        options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
