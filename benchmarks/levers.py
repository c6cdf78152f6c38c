"""What each lever buys: training steps with one of them taken away, beside autocast + GradScaler.

    python benchmarks/levers.py [--rounds 31] [--out FILE.md]

Taken away are the nodes that cast many weights (each weight is then cast by itself), batches
(lists of tensors are then dealt with tensor by tensor), and bare calls (torch's own frames
around `step` and `zero_grad` are then called).  A column without Python's garbage collector says
what that costs.  All this is the Python way; the native part, where it is built, has columns of
its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models import DISPATCH_BOUND
from systems import AGAIN, AUTOCAST, HALF, environment, make_step, with_native
from workers import machine, measure, speed_ups, table

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
SYSTEMS = [
    *(AUTOCAST, AGAIN, f"{AUTOCAST} without gc", HALF),
    *("O1", "O1 without nodes", "O1 without batches"),
    *("O1 without bare calls", "O1 without gc"),
    *("O2", "O2 without batches", "O2 without bare calls"),
]
STEPS = {"MLP, 8 layers": 40, "200 Linear(8, 8)": 4}


def make(name: str, system: str) -> Callable[[], None]:
    """The function that does one training step, `system` being "... without a lever" or whole."""
    torch.manual_seed(0)
    level, _, lever = system.partition(" without ")
    for owner, attribute, replacement in LEVERS[lever] if lever else []:
        mock.patch.object(owner, attribute, replacement).start()  # fails where there is none
    if lever == "gc":
        gc.disable()
    return make_step(DISPATCH_BOUND[name](), level, "ordinary", torch.bfloat16)


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    systems = with_native(SYSTEMS)
    columns: dict[str, dict[str, tuple]] = {}
    for name in DISPATCH_BOUND:
        steps = STEPS.get(name, 10)
        times = measure(
            functools.partial(make, name),
            systems,
            rounds=options.rounds,
            steps=steps,
            warm_up=steps,
            threads=1,
            clock=time.process_time,
            environments=lambda system: [environment(system)],
        )
        columns[name] = speed_ups(times, AUTOCAST)
    rows = [
        [name, *[f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in found.values()]]
        for name, found in columns.items()
    ]
    means = [
        statistics.geometric_mean(found[system][1] for found in columns.values())
        for system in systems
    ]
    rows.append(["geometric mean", *[f"**{mean:.3f}**" for mean in means]])
    text = (
        f"# A training step without one of the levers: speed over {AUTOCAST} + GradScaler\n\n"
        f"bfloat16, CPU, one thread, CPU time, SGD, dynamic loss scale: median and quartiles of "
        f"{options.rounds} rounds.\n{machine()}.\n\n{table(['', *systems], rows)}"
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
