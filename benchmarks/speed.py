"""Speed of a step of one system beside another's; each table is a row of `TABLES`.

Every system runs in a process of its own, on one thread, in turns.  What is given is the median
and the quartiles of the speed-ups within a round: the reference's time over the system's, above 1
is faster.  The reference is the first of the systems and is measured twice; believe a speed-up only
where its second measurement is within 0.03 of 1.  CPU time of the process, so that other work on
the machine counts less.  All columns but those called native run with AMPATCH_NATIVE=0.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from measuring import measure, speed_ups, table, told
from systems import (
    AGAIN,
    AUTOCAST,
    CACHED,
    COMPILER,
    FP32,
    FUSED,
    HALF,
    MICRO_BATCHES,
    NATIVE,
    PLAIN,
    RANKS,
    SYSTEMS,
    WITHOUT,
    How,
    environment,
    make_evaluation,
    make_step,
    ranks,
    with_native,
)
from tasks import DEEPER, LARGE, SMALL, TASKS

from ampatch.casting import batched_casts
from ampatch.scaling import optimizer
from ampatch.torch_private import foreach

# of each lever: where it is, and what stands there without it
LEVERS: dict[str, list[tuple[Any, str, Any]]] = {
    "nodes": [(batched_casts, "HOOKS_CAN_BE_SEEN", False)],
    "batches": [
        (foreach, name, functools.partial(foreach.one_by_one, name))
        for name in ("copy_", "add_", "mul_")
    ],
    "bare calls": [
        (optimizer, "bare_step", lambda original, managed: None),
        (optimizer, "is_bare_zero_grad", lambda original, managed: False),
    ],
    "gc": [],
}
TO_THE_LIMIT = [AUTOCAST, AUTOCAST + AGAIN, HALF, "O1", "O2"]
COMPILED = ("MLP, 8 layers", "conv net, BatchNorm", "transformer, d=16")
DDP = f"Training in DistributedDataParallel, {RANKS} gloo ranks"
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Table:
    """What one table measures."""

    title: str
    systems: list[str]
    how: How = PLAIN
    models: tuple[str, ...] = tuple(SMALL)
    clock: Callable[[], float] = time.process_time
    evaluates: bool = False
    in_time: bool = False  # the times of the steps are shown too


def _in(situation: str) -> How:
    return How(situation=situation)


TABLES = {
    "training": Table("Training, ordinary optimizer, dispatch-bound", SYSTEMS),
    # torch's fused SGD leaves half weights on the CPU as they are.
    "fused": Table(
        "Training, fused optimizer, dispatch-bound",
        [AUTOCAST, AUTOCAST + AGAIN, FP32, "O1", "O2"],
        How(optimizer=FUSED),
    ),
    "hooks": Table("Training with a hook on every parameter", TO_THE_LIMIT, _in("hooks")),
    "accumulation": Table(
        f"Training, {MICRO_BATCHES} micro-batches per step", TO_THE_LIMIT, _in("accumulation")
    ),
    "checkpoint": Table(
        "Training with activation checkpointing of each layer", TO_THE_LIMIT, _in("checkpoint")
    ),
    "ddp": Table(f"{DDP}: CPU time of rank 0", TO_THE_LIMIT, _in("ddp")),
    "ddp-wall": Table(f"{DDP}: wall time", TO_THE_LIMIT, _in("ddp"), clock=time.perf_counter),
    "compile": Table(
        f"Training under torch.compile ({COMPILER})", TO_THE_LIMIT, _in("compile"), COMPILED
    ),
    "evaluation": Table(
        "Evaluation under no_grad, dispatch-bound; cached: inside one block of cached_weights",
        [*SYSTEMS, "O1" + CACHED, "O2" + CACHED],
        evaluates=True,
    ),
    "compute": Table("Training, compute-bound", SYSTEMS, models=tuple(LARGE)),
    "compute-compile": Table(
        f"Training, compute-bound, under torch.compile ({COMPILER})",
        TO_THE_LIMIT,
        _in("compile"),
        ("MLP 1024", "ResNet-like", "GPT block, d=256"),
    ),
    "levels": Table(
        "The levels beside FP32, compute-bound",
        ["O0", "O0" + AGAIN, "O1", "O2", "O3", AUTOCAST],
        How(optimizer=MOMENTUM, always_scaled=False),
        ("MLP 1024", "conv net 64"),
    ),
    "levers": Table(
        "A training step without one of the levers",
        [
            *(AUTOCAST, AUTOCAST + AGAIN, f"{AUTOCAST}{WITHOUT}gc", HALF),
            *("O1", "O1 without nodes", "O1 without batches"),
            *("O1 without bare calls", "O1 without gc"),
            *("O2", "O2 without batches", "O2 without bare calls"),
        ],
    ),
    "nodes": Table(
        "Casts of few weights and of many in one node, and each by itself",
        ["O1", "O1" + AGAIN, "O1 without nodes"],
        models=("GAN", *DEEPER),
        in_time=True,
    ),
    "parameters": Table(
        "Many parameter tensors",
        TO_THE_LIMIT,
        models=("100 tensors", "1000 tensors", "10000 tensors"),
        in_time=True,
    ),
    "elements": Table(
        "100 million elements", TO_THE_LIMIT, models=("6 Linear(4096, 4096)",), in_time=True
    ),
}


def make(which: str, name: str, dtype: str, system: str) -> Callable[[], None]:
    """The function that does one step of a table's model under a system."""
    torch.manual_seed(0)
    of = TABLES[which]
    how = replace(of.how, dtype=getattr(torch, dtype))
    whole, _, lever = system.partition(WITHOUT)
    for owner, attribute, replacement in LEVERS[lever] if lever else []:
        mock.patch.object(owner, attribute, replacement).start()  # fails where there is none
    if lever == "gc":
        gc.disable()
    return (make_evaluation if of.evaluates else make_step)(TASKS[name](), whole, how)


def environments(which: str, system: str) -> list[dict[str, str]]:
    """The environments of a system's processes: several where a table has ranks."""
    processes = ranks() if TABLES[which].how.situation == "ddp" else [{}]
    return [{**environment(system), **variables} for variables in processes]


def report(which: str, options: Namespace) -> Iterator[str]:
    """A row per model, and the geometric means."""
    of = TABLES[which]
    systems = options.systems or with_native(of.systems)
    if with_native(systems) == systems and not any(NATIVE in one for one in systems):
        yield "No native part is built here: its columns are left out.\n"
    rows, times_rows, medians = [], [], []
    for name in options.models or of.models:
        times = _times(which, name, systems, options)
        found = speed_ups(times, systems[0]).values()
        medians.append([middle for _, middle, _ in found])
        rows.append([name, *map(told, found)])
        times_rows.append([name, *(f"{statistics.median(times[s]) * 1e3:.3g}" for s in systems)])
        print(*rows[-1], sep=" | ", flush=True)
    means = [f"**{statistics.geometric_mean(column):.3f}**" for column in zip(*medians)]
    yield f"### {of.title}\n\n" + table(["", *systems], [*rows, ["geometric mean", *means]])
    if of.in_time:
        yield "Milliseconds of a step, medians.\n\n" + table(["", *systems], times_rows)


def _times(which: str, name: str, systems: list[str], options: Namespace) -> dict[str, list[float]]:
    run = functools.partial(
        measure,
        functools.partial(make, which, name, options.dtype),
        clock=TABLES[which].clock,
        environments=functools.partial(environments, which),
    )
    a_step = min(run(systems[:1], rounds=3, steps=2)[systems[0]])
    return run(systems, rounds=options.rounds, steps=max(1, round(options.seconds / a_step)))
