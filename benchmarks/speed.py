"""Speed of a step of one system beside another's; each table is a row of `TABLES`.

Every system runs in a process of its own, on one thread, in turns.  What is given is the median
and the quartiles of the speed-ups within a round: the reference's time over the system's, above 1
is faster.  The reference is the first of the systems and is measured twice; believe a speed-up only
where its second measurement is within 0.03 of 1.  CPU time of the process, so that other work on
the machine counts less.  All columns but those called native run with AMPATCH_NATIVE=0.
"""

from __future__ import annotations

import functools
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from measuring import measure, speed_ups, table, told
from realistic import REALISTIC
from systems import (
    AGAIN,
    AUTOCAST,
    COMPILER,
    FP32,
    FUSED,
    HALF,
    MICRO_BATCHES,
    NATIVE,
    PLAIN,
    SYSTEMS,
    How,
    environment,
    make_evaluation,
    make_step,
    with_native,
)
from tasks import LARGE, SMALL, TASKS

TO_THE_LIMIT = [AUTOCAST, AUTOCAST + AGAIN, HALF, "O1", "O2"]
COMPILED = ("MLP, 8 layers", "conv net, BatchNorm", "transformer, d=16")
USUAL = ("encoder", "ViT", "U-Net")
SYSTEMS_OF_USERS = [AUTOCAST, AUTOCAST + AGAIN, FP32, "O1", "O2", "O3"]
ADAMW = How(optimizer=functools.partial(torch.optim.AdamW, lr=1e-4))
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Table:
    """What one table measures."""

    title: str
    systems: list[str]
    how: How = PLAIN
    models: tuple[str, ...] = tuple(SMALL)
    evaluates: bool = False


TABLES = {
    "training": Table("Training, ordinary optimizer, dispatch-bound", SYSTEMS),
    # torch's fused SGD leaves half weights on the CPU as they are.
    "fused": Table(
        "Training, fused optimizer, dispatch-bound",
        [AUTOCAST, AUTOCAST + AGAIN, FP32, "O1", "O2"],
        How(optimizer=FUSED),
    ),
    "hooks": Table("Training with a hook on every parameter", TO_THE_LIMIT, How(situation="hooks")),
    "accumulation": Table(
        f"Training, {MICRO_BATCHES} micro-batches per step",
        TO_THE_LIMIT,
        How(situation="accumulation"),
    ),
    "checkpoint": Table(
        "Training with activation checkpointing of each layer",
        TO_THE_LIMIT,
        How(situation="checkpoint"),
    ),
    "compile": Table(
        f"Training under torch.compile ({COMPILER})",
        TO_THE_LIMIT,
        How(situation="compile"),
        COMPILED,
    ),
    "evaluation": Table(
        "Evaluation under no_grad, dispatch-bound",
        SYSTEMS,
        evaluates=True,
    ),
    "compute": Table("Training, compute-bound", SYSTEMS, models=tuple(LARGE)),
    "compute-compile": Table(
        f"Training, compute-bound, under torch.compile ({COMPILER})",
        TO_THE_LIMIT,
        How(situation="compile"),
        ("MLP 1024", "ResNet-like", "GPT block, d=256"),
    ),
    "realistic": Table(
        "Training of models of users' sizes", SYSTEMS_OF_USERS, ADAMW, tuple(REALISTIC)
    ),
    "realistic-evaluation": Table(
        "Evaluation of models of users' sizes under no_grad",
        *(SYSTEMS_OF_USERS, PLAIN, tuple(REALISTIC)),
        evaluates=True,
    ),
    "realistic-compile": Table(
        f"Training of models of users' sizes under torch.compile ({COMPILER})",
        *(TO_THE_LIMIT, replace(ADAMW, situation="compile"), USUAL),
    ),
    "realistic-compile-evaluation": Table(
        f"Evaluation of models of users' sizes under torch.compile ({COMPILER})",
        # Under autocast torch refuses the compiled ViT here: two dtypes meet in its fused layer.
        *(TO_THE_LIMIT, replace(ADAMW, situation="compile"), ("encoder", "U-Net")),
        evaluates=True,
    ),
    "levels": Table(
        "The levels beside FP32, compute-bound",
        ["O0", "O0" + AGAIN, "O1", "O2", "O3", AUTOCAST],
        How(optimizer=MOMENTUM, always_scaled=False),
        ("MLP 1024", "conv net 64"),
    ),
}


ALL = {**TASKS, **REALISTIC}


def make(which: str, name: str, dtype: str, system: str) -> Callable[[], None]:
    """The function that does one step of a table's model under a system."""
    torch.manual_seed(0)
    of = TABLES[which]
    how = replace(of.how, dtype=getattr(torch, dtype))
    return (make_evaluation if of.evaluates else make_step)(ALL[name](), system, how)


def report(which: str, options: Namespace) -> Iterator[str]:
    """A row per model, and the geometric means."""
    of = TABLES[which]
    systems = options.systems or with_native(of.systems)
    if with_native(systems) == systems and not any(NATIVE in system for system in systems):
        yield "No native part is built here: its columns are left out.\n"
    rows, medians = [], []
    for name in options.models or of.models:
        times = measure(
            functools.partial(make, which, name, options.dtype),
            systems,
            rounds=options.rounds,
            seconds=options.seconds,
            environment=environment,
        )
        ratios = speed_ups(times, systems[0]).values()
        medians.append([middle for _, middle, _ in ratios])
        rows.append([name, *map(told, ratios)])
        print(*rows[-1], sep=" | ", flush=True)
    means = [f"**{statistics.geometric_mean(column):.3f}**" for column in zip(*medians)]
    yield f"### {of.title}\n\n" + table(["", *systems], [*rows, ["geometric mean", *means]])
