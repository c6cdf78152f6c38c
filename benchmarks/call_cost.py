"""What a call costs that ampatch does not cast: of a patched function, and of any other.

    python benchmarks/call_cost.py > benchmarks/results/DATE-call-cost.md

One process, no gradients, tensors of 4 by 4, processor time.  The states take turns in rounds; a
figure is the median over rounds, with quartiles, of nanoseconds per call, and
"extra" is taken within each round.  The first table prices the replacement alone,
on a C function that does next to nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import wrapt
from torch import nn
from workers import machine

import ampatch
from ampatch.casting.cast_state import CastState
from ampatch.casting.rules import CHOOSERS
from ampatch.casting.tables import Rule
from ampatch.casting.wrapper import replacement

ROUNDS, CALLS = 60, 2000
FULL = torch.randn(4, 4)
HALF = FULL.bfloat16()
DESIGN = (
    "The design was made with these prices for a C function: direct 35, plain closure about 100, "
    "FunctionWrapper about 480."
)
State = tuple[str, Callable[[], AbstractContextManager], Callable[[], Callable]]


def closure(function: Callable) -> Callable:
    """The least that a plain Python function in front of another can cost."""

    def call(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return call


def alone() -> list[State]:
    """The replacement beside the ways to wrap a function."""
    state = CastState()  # no session: no policy
    functions = {
        "direct": math.fabs,
        "plain closure": closure(math.fabs),
        "ampatch's replacement, inactive": replacement(math.fabs, CHOOSERS[Rule.HALF], state),
        "wrapt.FunctionWrapper": wrapt.FunctionWrapper(math.fabs, lambda f, _, a, k: f(*a, **k)),
    }
    return [
        (name, contextlib.nullcontext, lambda function=function: lambda: function(1.0))
        for name, function in functions.items()
    ]


@contextmanager
def session(**options: object) -> Iterator[None]:
    """A managed model, and what comes with it."""
    options = {"patch_scope": "process", **options}
    ampatch.initialize(nn.Linear(4, 4), dtype=torch.bfloat16, verbosity=0, **options)
    try:
        yield
    finally:
        ampatch.deactivate()


@contextmanager
def without_casts() -> Iterator[None]:
    """A session, inside `disable_casts`."""
    with session(), ampatch.disable_casts():
        yield


@contextmanager
def after_deactivate() -> Iterator[None]:
    """A session that has come and gone."""
    with session():
        pass
    yield


def states(name: str, *arguments: torch.Tensor) -> list[State]:
    """The states of the process in which `torch.NAME` is called; it is looked up in them."""

    def make() -> Callable:
        function = getattr(torch, name)
        return lambda: function(*arguments)

    in_force = ("O1, in force, nothing to cast", session, make)
    return [
        ("no ampatch", contextlib.nullcontext, make),
        ("no ampatch, again", contextlib.nullcontext, make),
        ("after deactivate()", after_deactivate, make),
        ("O1, inside disable_casts()", without_casts, make),
        ('patch_scope="model", outside its forward', lambda: session(patch_scope="model"), make),
        ("O2: no tables", lambda: session(opt_level="O2"), make),
        *([in_force] if name != "mm" or arguments[0] is HALF else []),
    ]


def measure(systems: list[State]) -> dict[str, list[float]]:
    """Nanoseconds per call of each, one figure per round."""
    found: dict[str, list[float]] = {name: [] for name, _, _ in systems}
    for number in range(ROUNDS):
        turn = number % len(systems)
        for name, state, make in systems[turn:] + systems[:turn]:
            with state():
                call = make()
                timeit.timeit(call, number=CALLS // 10)
                seconds = timeit.timeit(call, number=CALLS, timer=time.process_time)
                found[name].append(seconds / CALLS * 1e9)
    return found


def table(title: str, found: dict[str, list[float]]) -> str:
    """A markdown table; the first system is what the others are compared with."""
    base = next(iter(found.values()))
    lines = [f"| {title} | ns | extra ns |", "|---|---|---|"]
    for name, times in found.items():
        extra = [time - plain for time, plain in zip(times, base, strict=True)]
        lines.append(f"| {name} | {_quartiles(times)} | {_quartiles(extra)} |")
    return "\n".join(lines)


def _quartiles(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    print(
        f"Nanoseconds of processor time per call, {ROUNDS} interleaved rounds of {CALLS}: "
        "median and quartiles."
    )
    print(f"{machine()}.")
    print(DESIGN, end="\n\n")
    with torch.no_grad():
        print(table("a C function", measure(alone())), end="\n\n")
        print(table("torch.mm of FP32", measure(states("mm", FULL, FULL))), end="\n\n")
        print(table("torch.mm of half", measure(states("mm", HALF, HALF))), end="\n\n")
        print(table("torch.relu (in no table)", measure(states("relu", FULL))))


if __name__ == "__main__":
    main()
