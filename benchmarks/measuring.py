"""How the benchmarks measure: processes in turns, CPU time, and the tables that come of it.

Patches are global to a process, so every system gets its own; the machine is noisy, so the systems
take turns and only ratios within a round count.  glibc is told to keep the memory it has
(`KEEP_MEMORY`): by itself it returns large blocks and asks for them again, in some processes
thousands of pages a step and in others none, which says nothing of the systems.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # bytes; the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**27),
}


def _serve(connection: Connection, make: Callable, system: str) -> None:
    torch.set_num_threads(1)
    step = make(system)  # should it fail, the connection closes and whoever asks gets EOFError
    while (steps := connection.recv()) is not None:
        begin = time.process_time()
        for _ in range(steps):
            step()
        connection.send((time.process_time() - begin) / steps)


def measure(
    make: Callable[[str], Callable],
    systems: list[str],
    *,
    rounds: int,
    seconds: float,
    environment: Callable[[str], dict[str, str]] = lambda system: {},
) -> dict[str, list[float]]:
    """CPU seconds per step of each system, one figure per round, of one thread.

    In a turn a system does as many steps as the first one does in `seconds`.
    `make(system)` builds, in the system's own process, the function that does one step.
    `environment(system)` has the variables set in that process before it imports torch.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for system in systems:
        pipes[system], theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, make, system), daemon=True)
        with mock.patch.dict(os.environ, KEEP_MEMORY | environment(system)):
            process.start()
        theirs.close()
        processes.append(process)

    def ask(system: str, count: int) -> float:
        pipes[system].send(count)
        return pipes[system].recv()

    steps = max(1, round(seconds / min(ask(systems[0], 2) for _ in range(4))))
    for system in systems:
        ask(system, max(3, steps))
    times: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(rounds):
        first = number % len(systems)
        for system in systems[first:] + systems[:first]:
            times[system].append(ask(system, steps))
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return times


Quartiles = tuple[float, float, float]


def told(quartiles: Quartiles) -> str:
    """`1.09 (1.08 to 1.10)`."""
    low, middle, high = (f"{value:.2f}" for value in quartiles)
    return f"{middle} ({low} to {high})"


def speed_ups(times: dict[str, list[float]], reference: str) -> dict[str, Quartiles]:
    """Quartiles of the reference's time over each system's; above 1 is faster than it."""
    ratios_by_system = {}
    for system, values in times.items():
        ratios = [base / value for value, base in zip(values, times[reference])]
        low, middle, high = statistics.quantiles(ratios if len(ratios) > 1 else ratios * 2, n=4)
        ratios_by_system[system] = low, middle, high
    return ratios_by_system


def machine() -> str:
    """Date, machine and versions, for the head of a result."""
    today = datetime.date.today().isoformat()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{today}, {device}, Python {platform.python_version()}, torch {torch.__version__}"


def command() -> str:
    """What was asked of the runner."""
    return shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]])


def alone(function: Callable, *args: Any, environment: dict[str, str] | None = None) -> Any:
    """The result of a function that runs in a process of its own, with these variables set."""
    with mock.patch.dict(os.environ, environment or {}):
        pool = multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,))
    with pool:
        return pool.apply(function, args)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """In Markdown."""
    lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    written = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([written[0], "|---" * len(lines[0]) + "|", *written[1:]]) + "\n"
