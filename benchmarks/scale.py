"""What grows with what: parameters, elements, open sessions, patched functions.

    python benchmarks/scale.py [--parts parameters,elements,sessions,functions] [--out FILE.md]

Every figure comes from a process of its own, in CPU time of one thread.  Growth is
linear where the figure per tensor, or per session, stays the same down a column.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import memory
import torch
import torch.nn.functional as F
from many_sessions import SETTINGS, sessions
from models import Task, mlp8
from systems import AUTOCAST, HALF, make_step
from torch import Tensor, nn
from workers import alone, machine, measure, seconds, speed_ups, table

import ampatch as amp

AGAIN = "autocast again"
DTYPE = torch.bfloat16
MEGABYTE = 2**20


# Parameters: many tiny tensors


class Branches(nn.Module):
    """Chains of ten Linear(8, 8) side by side, their outputs added up."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        chains = [
            nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)]) for _ in range(tensors // 20)
        ]
        self.chains = nn.ModuleList(chains)

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(torch.add, [chain(x) for chain in self.chains])


def branches(tensors: int) -> Task:
    """A model of so many parameter tensors, and its loss."""
    inputs, targets = torch.randn(4, 8), torch.randint(0, 8, (4,))
    return Task([Branches(tensors)], [lambda modules: F.cross_entropy(modules[0](inputs), targets)])


def step_of_branches(tensors: int, system: str) -> Callable[[], None]:
    """One training step."""
    torch.manual_seed(0)
    return make_step(branches(tensors), system, "ordinary", DTYPE)


def in_and_out(tensors: int, level: str) -> tuple[float, float]:
    """Seconds of `initialize` and of `deactivate`."""
    model = Branches(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    enter = functools.partial(amp.initialize, model, optimizer, opt_level=level, **SETTINGS)
    times = [(seconds(enter), seconds(amp.deactivate)) for _ in range(5)]
    return min(one for one, _ in times), min(other for _, other in times)


def parameters(rounds: int) -> Iterator[str]:
    """Tables of a training step, and of coming in and going out."""
    systems = [AUTOCAST, AGAIN, HALF, "O1", "O2"]
    steps_rows, open_rows = [], []
    for tensors in (100, 1000, 10_000):
        times = measure(
            functools.partial(step_of_branches, tensors),
            systems,
            rounds=rounds,
            steps=max(1, 2000 // tensors),
            warm_up=3,
            threads=1,
            clock=time.process_time,
        )
        per_tensor = [f"{statistics.median(times[one]) / tensors * 1e6:.2f}" for one in systems]
        to_autocast = [f"{middle:.2f}" for _, middle, _ in speed_ups(times, AUTOCAST).values()]
        pairs = zip(per_tensor, to_autocast, strict=True)
        steps_rows.append([f"{tensors:,}", *[f"{each} ({ratio})" for each, ratio in pairs]])
        cells = [alone(in_and_out, tensors, level) for level in ("O1", "O2")]
        open_rows.append([f"{tensors:,}", *[f"{x * 1e3:.1f}" for cell in cells for x in cell]])
    yield (
        "### Many parameters: training step\n\n"
        "Microseconds per parameter tensor; in brackets the speed-up over autocast.\n"
    )
    yield table(["tensors", *systems], steps_rows)
    yield "### Many parameters: coming in and going out\n\nMilliseconds.\n"
    calls = [f"{level} `{call}`" for level in ("O1", "O2") for call in ("initialize", "deactivate")]
    yield table(["tensors", *calls], open_rows)


# Elements: few large tensors


def large() -> tuple[nn.Module, memory.Batch]:
    """Six Linear(4096, 4096), 101 million elements, and a batch of 32."""
    layers = [nn.Linear(4096, 4096) for _ in range(6)]
    return nn.Sequential(*layers), (torch.randn(32, 4096), torch.randint(0, 4096, (32,)))


def step_of_large(system: str) -> Callable[[], None]:
    """One training step."""
    model, (inputs, targets) = large()
    task = Task([model], [lambda modules: F.cross_entropy(modules[0](inputs), targets)])
    return make_step(task, system, "ordinary", DTYPE)


def elements(rounds: int) -> Iterator[str]:
    """A table of time and memory."""
    systems = [AUTOCAST, AGAIN, HALF, "O1", "O2"]
    found = measure(
        step_of_large,
        systems,
        rounds=rounds,
        steps=1,
        warm_up=2,
        threads=1,
        clock=time.process_time,
    )
    rows = []
    base = alone(memory.peak_bytes, large, memory.REFERENCE)
    for system, (low, middle, high) in speed_ups(found, AUTOCAST).items():
        known = {AUTOCAST: memory.REFERENCE, AGAIN: memory.REFERENCE}.get(system, system)
        peak = base if known == memory.REFERENCE else alone(memory.peak_bytes, large, known)
        milliseconds = f"{statistics.median(found[system]) * 1e3:.0f}"
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append([system, milliseconds, ratio, f"{peak / MEGABYTE:.0f}", f"{peak / base:.3f}"])
    yield (
        "### 100 million elements\n\n"
        "Six Linear(4096, 4096), batch 32. Time with SGD; peak tensor memory of a step with Adam.\n"
    )
    yield table(["", "ms per step", "speed-up over autocast", "peak MB", "of autocast's"], rows)


# Functions: patched and registered ones


def calls_of_a_step(level: str, functions: int) -> tuple[int, int]:
    """Python and C functions called in a step of the 8-layer MLP, with so many registered."""
    users = types.ModuleType("users_own")
    for index in range(functions):
        setattr(users, f"function{index}", lambda x: x)
        amp.register_half_function(users, f"function{index}")
    step = make_step(mlp8(), level, "ordinary", DTYPE)
    for _ in range(5):
        step()
    with counted_calls() as found:
        step()
    return found.count("call"), found.count("c_call")


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """A list that gets "call" for each Python function entered and "c_call" for each C function."""
    events: list[str] = []
    gc.disable()  # what it calls comes when it likes
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        yield events
    finally:
        sys.setprofile(None)
        gc.enable()


def functions(_: int) -> Iterator[str]:
    """A table of exact counts."""
    counts = (0, 100, 1000)
    rows = []
    for level in ("O1", "O2"):
        found = [alone(calls_of_a_step, level, count) for count in counts]
        rows.append([level, *[f"{python} / {native}" for python, native in found]])
    yield (
        "### Patched functions\n\n"
        "Python / C functions called in a training step of the 8-layer MLP, with so many "
        "registered functions of the user's.\n"
    )
    yield table(["", *map(str, counts)], rows)


PARTS = {
    "parameters": parameters,
    "elements": elements,
    "sessions": sessions,
    "functions": functions,
}


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = [
        f"# What grows with what\n\n{DTYPE}, CPU, one thread, dynamic loss scale.\n{machine()}.\n"
    ]
    for part in options.parts.split(","):
        for piece in PARTS[part](options.rounds):
            print(piece, flush=True)
            text.append(piece)
    if options.out is not None:
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    main()
