"""Where the time of one training step goes: its parts, under each system.

    python benchmarks/step_parts.py [--models NAME] [--steps 600] [--out FILE.md]

Each system runs in a process of its own.  A part's time is the 5th percentile of its times in
all steps, so that other work on the machine counts little.  In brackets: the calls of Python and C
functions that the part makes, which are exact.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import DISPATCH_BOUND
from systems import AUTOCAST, HALF, make_parts, with_native
from systems import environment as environment_of
from workers import alone, machine, table

PARTS = ("zero_grad", "forward", "enter", "backward", "exit", "step")
MODELS = ("MLP, 8 layers", "LSTM", "transformer, d=16")
WARM_UP = 20


def times(name: str, system: str, steps: int) -> list[tuple[float, int]]:
    """Microseconds and calls of each part; `name` is a model with one optimizer."""
    torch.manual_seed(0)
    parts = make_parts(DISPATCH_BOUND[name](), system, torch.bfloat16)
    for _ in range(WARM_UP):
        list(parts())
    gc.collect()
    gc.disable()
    seconds = sorted_columns(list(marks(parts)) for _ in range(steps))
    return list(zip([1e6 * column[steps // 20] for column in seconds], calls(parts), strict=True))


def marks(parts: Callable[[], Iterator[Any]]) -> Iterator[float]:
    """The seconds that each part takes, one after the other."""
    begin = time.perf_counter()
    for _ in parts():
        end = time.perf_counter()
        yield end - begin
        begin = time.perf_counter()


def sorted_columns(rows: Any) -> list[list[float]]:
    """The columns of a table, each sorted."""
    return [sorted(column) for column in zip(*rows, strict=True)]


def calls(parts: Callable[[], Iterator[Any]]) -> list[int]:
    """How many functions each part calls."""
    counted = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        counted[-1] += event in ("call", "c_call")

    running = parts()
    for _ in PARTS:
        sys.setprofile(count)
        next(running)
        sys.setprofile(None)
        counted.append(0)
    return [number - 2 for number in counted[:-1]]  # less `next` and `sys.setprofile`


def page(name: str, steps: int) -> str:
    """One model, in Markdown: a row per system."""
    rows = []
    for system in with_native([AUTOCAST, HALF, "O1", "O2"]):
        os.environ.update(environment_of(system))
        found = alone(times, name, system, steps)
        cells = [f"{taken:.0f} ({called})" for taken, called in found]
        total = f"{sum(taken for taken, _ in found):.0f} ({sum(called for _, called in found)})"
        rows.append([system, *cells, total])
    return f"### {name}\n\n" + table(["", *PARTS, "all"], rows)


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", action="append", choices=MODELS, metavar="NAME")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    head = (
        "# Where the time of a training step goes\n\nbfloat16, CPU, one thread, SGD, dynamic loss "
        f"scaling. Microseconds: the 5th percentile of {options.steps} steps; in brackets the "
        f"calls of Python and C functions.\n{machine()}.\n"
    )
    parts = [head, *(page(name, options.steps) for name in options.models or MODELS)]
    print("\n".join(parts))
    if options.out is not None:
        options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
