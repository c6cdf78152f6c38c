"""How the benchmarks measure: processes in turns, CPU time, and the tables that come of it.

Patches are global to a process, so every system gets its own; the machine is
noisy, so the systems take turns and only ratios within a round count.  glibc is told to keep
the memory it has (`KEEP_MEMORY`): by itself it returns large blocks and asks for them again, in
some processes thousands of pages a step and in others none, which says nothing of the systems.
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


def _serve(connection: Connection, make: Callable, system: str, clock: Callable[[], float]) -> None:
    torch.set_num_threads(1)
    step = make(system)  # should it fail, the connection closes and whoever asks gets EOFError
    while (steps := connection.recv()) is not None:
        begin = clock()
        for _ in range(steps):
            step()
        connection.send((clock() - begin) / steps)


def measure(
    make: Callable[[str], Callable],
    systems: list[str],
    *,
    rounds: int,
    steps: int,
    clock: Callable[[], float] = time.process_time,
    environments: Callable[[str], list[dict[str, str]]] = lambda system: [{}],
) -> dict[str, list[float]]:
    """Seconds per step of each system, one figure per round, of one thread.

    `make(system)` builds, in the system's own process, the function that does one step.
    `environments(system)` has the variables set in that process before it imports torch.  With
    more than one entry a system has as many processes (ranks): they step together, and the
    first is measured.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Connection]] = {system: [] for system in systems}
    processes = []
    for system in systems:
        for environment in environments(system):
            ours, theirs = context.Pipe()
            arguments = (theirs, make, system, clock)
            processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            with mock.patch.dict(os.environ, KEEP_MEMORY | environment):
                processes[-1].start()
            theirs.close()
            pipes[system].append(ours)
    for system in systems:
        _ask(pipes[system], max(3, steps))
    times: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(rounds):
        for system in _turned(systems, number):
            times[system].append(_ask(pipes[system], steps))
    for pipe in [pipe for ranks in pipes.values() for pipe in ranks]:
        pipe.send(None)
    for process in processes:
        process.join()
    return times


def _ask(ranks: list[Connection], steps: int) -> float:
    for pipe in ranks:
        pipe.send(steps)
    first, *_ = [pipe.recv() for pipe in ranks]
    return first


def _turned(entries: list, number: int) -> list:
    turn = number % len(entries)
    return entries[turn:] + entries[:turn]


def in_turns(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The figures of each way, one per round: A B C, B C A, C A B."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in _turned(list(ways), number):
            found[name].append(ways[name]())
    return found


Quartiles = tuple[float, float, float]


def quartiles(values: Iterable[float]) -> Quartiles:
    """The lower quartile, the median and the upper quartile; of one value, that value."""
    values = list(values)
    low, middle, high = statistics.quantiles(values if len(values) > 1 else values * 2, n=4)
    return low, middle, high


def told(found: Quartiles, places: int = 2) -> str:
    """`1.09 (1.08 to 1.10)`."""
    low, middle, high = (f"{value:.{places}f}" for value in found)
    return f"{middle} ({low} to {high})"


def speed_ups(times: dict[str, list[float]], reference: str) -> dict[str, Quartiles]:
    """Quartiles of the reference's time over each system's; above 1 is faster than it."""
    return {
        system: quartiles(base / value for value, base in zip(values, times[reference]))
        for system, values in times.items()
    }


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


def seconds(function: Callable[[], Any], calls: int = 1) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - begin) / calls


def best(function: Callable[[], Any], calls: int = 20, rounds: int = 5) -> float:
    """CPU time of one call, the least of several rounds."""
    return min(seconds(function, calls) for _ in range(rounds))


def table(head: list[str], rows: Iterable[list[Any]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"
