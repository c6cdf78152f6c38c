"""What parts cost by themselves: those of a step, of starting, of a call that is not cast."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import subprocess
import sys
import time
import timeit
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import wrapt
from counts import calls
from measuring import alone, in_turns, quartiles, table, told
from systems import AUTOCAST, HALF, PARTS, How, environment, make_parts, with_native
from tasks import TASKS
from torch import nn

import ampatch
from ampatch.casting.cast_state import CastState
from ampatch.casting.rules import CHOOSERS
from ampatch.casting.tables import Rule
from ampatch.casting.wrapper import replacement

# The parts of a step

IN_PARTS = ("MLP, 8 layers", "LSTM", "transformer, d=16")  # with one optimizer each


def parts_of(name: str, system: str, steps: int) -> list[tuple[float, int]]:
    """Microseconds and calls of each part; the 5th percentile of its times counts."""
    torch.manual_seed(0)
    parts = make_parts(TASKS[name](), system, How())
    for _ in range(20):
        list(parts())
    gc.collect()
    gc.disable()
    columns = zip(*[list(_marks(parts())) for _ in range(steps)])
    times = [1e6 * sorted(column)[steps // 20] for column in columns]
    running = parts()
    return list(zip(times, [sum(calls(partial(next, running))) for _ in PARTS]))


def _marks(running: Iterator[Any]) -> Iterator[float]:
    begin = time.perf_counter()
    for _ in running:
        end = time.perf_counter()
        yield end - begin
        begin = time.perf_counter()


def step_parts(options: Namespace) -> Iterator[str]:
    """A table per model: a row per system."""
    for name in options.models or IN_PARTS:
        rows = []
        for system in with_native([AUTOCAST, HALF, "O1", "O2"]):
            variables = environment(system)
            found = alone(parts_of, name, system, options.steps, environment=variables)
            found.append(tuple(map(sum, zip(*found))))
            rows.append([system, *[f"{taken:.0f} ({called})" for taken, called in found]])
        yield f"### {name}\n\n" + table(["", *PARTS, "all"], rows)


# Starting

IMPORT = """
import time, torch
begin = time.process_time()
import ampatch
print(time.process_time() - begin)
"""
INITIALIZE = """
import time, torch, ampatch
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(80)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
begin = time.process_time()
ampatch.initialize(model, optimizer, opt_level="{level}", dtype=torch.bfloat16, verbosity=0)
print(time.process_time() - begin)
"""


def _printed(program: str, variables: dict[str, str]) -> float:
    """What a program prints, which runs in a process of its own."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return float(done.stdout)


def startup(options: Namespace) -> Iterator[str]:
    """A row for the import and for `initialize` at each level, after a round for the bytecode."""
    programs: dict[str, Callable[[], float]] = {}
    for system in with_native(["O1", "O2"]):
        level, _, native = system.partition(" ")
        ways = {f"`import ampatch` {native}": IMPORT, f"`initialize`, {system}": INITIALIZE}
        for name, program in ways.items():
            source = program.format(level=level)
            programs[name.strip()] = partial(_printed, source, environment(system))
    times = in_turns(programs, 1 + options.rounds)
    rows = [
        [name, told(quartiles(1e3 * value for value in values[1:]), 1)]
        for name, values in times.items()
    ]
    yield table(["", "ms"], rows)


# Calls

CALLS = 2000
FULL = torch.ones(4, 4)
Around = Callable[[], contextlib.AbstractContextManager]


def closure(function: Callable) -> Callable:
    """The least that a plain Python function in front of another can cost."""

    def call(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return call


WRAPPED: dict[str, Callable] = {
    "direct": math.fabs,
    "plain closure": closure(math.fabs),
    "ampatch's replacement, inactive": replacement(math.fabs, CHOOSERS[Rule.HALF], CastState()),
    "wrapt.FunctionWrapper": wrapt.FunctionWrapper(math.fabs, lambda f, _, a, k: f(*a, **k)),
}


@contextlib.contextmanager
def session(ended: bool = False, without: bool = False, **options: Any) -> Iterator[None]:
    """A managed model and what comes with it: still there, ended, or inside `disable_casts`."""
    options = {"patch_scope": "process", **options}
    ampatch.initialize(nn.Linear(4, 4), dtype=torch.bfloat16, verbosity=0, **options)
    if ended:
        ampatch.deactivate()
    with ampatch.disable_casts() if without else contextlib.nullcontext():
        yield
    ampatch.deactivate()


STATES: dict[str, Around] = {
    "no ampatch": contextlib.nullcontext,
    "no ampatch, again": contextlib.nullcontext,
    "after deactivate()": partial(session, ended=True),
    "O1, inside disable_casts()": partial(session, without=True),
    'patch_scope="model", outside its forward': partial(session, patch_scope="model"),
    "O2: no tables": partial(session, opt_level="O2"),
    "O1, in force": session,
}


def _nanoseconds(around: Around, function: Callable[[], Callable], *args: Any) -> float:
    with around():
        found = function()  # looked up in this state
        timeit.timeit(lambda: found(*args), number=CALLS // 10)
        taken = timeit.timeit(lambda: found(*args), number=CALLS, timer=time.process_time)
    return taken / CALLS * 1e9


def one_call(options: Namespace) -> Iterator[str]:
    """Tables of nanoseconds per call; the first state is what the others are compared with."""
    plain = contextlib.nullcontext
    by_way = {
        name: partial(_nanoseconds, plain, lambda one=one: one, 1.0)
        for name, one in WRAPPED.items()
    }
    tables = {"a C function": by_way}
    for title, name, args in (
        ("torch.mm of FP32", "mm", (FULL, FULL)),
        ("torch.mm of half", "mm", (FULL.bfloat16(), FULL.bfloat16())),
        ("torch.relu (in no table)", "relu", (FULL,)),
    ):
        look_up = partial(getattr, torch, name)
        tables[title] = {
            state: partial(_nanoseconds, around, look_up, *args) for state, around in STATES.items()
        }
    with torch.no_grad():
        for title, ways in tables.items():
            found = in_turns(ways, options.rounds)
            base = next(iter(found.values()))
            extra = {name: map(float.__sub__, times, base) for name, times in found.items()}
            rows = [
                [name, told(quartiles(times), 0), told(quartiles(extra[name]), 0)]
                for name, times in found.items()
            ]
            yield table([title, "ns", "extra ns"], rows)
