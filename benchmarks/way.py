"""The way of a call and of a step through ampatch's files, in Python, counted exactly.

Of one `Linear`, after four steps: calls of ampatch's functions, files that they are in, and changes
from one file to another in the order of the calls, the first file included.  The functions of the
backward pass count too.  To be run with AMPATCH_NATIVE=0: the native part does several in one call.
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import alone, table
from torch import nn

import ampatch as amp

WARM_UP = 4
PACKAGE = str(Path(amp.__file__).parent)


class Way(NamedTuple):
    """What one thing that a script does makes ampatch do."""

    calls: int
    files: int
    changes: int


def way_of(does: Callable[[], object]) -> Way:
    """Count ampatch's own functions while it runs."""
    entered: list[str] = []

    def profile(frame, event, argument):  # type: ignore[no-untyped-def]
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        does()
    finally:
        sys.setprofile(None)
    pairs = itertools.pairwise(entered)
    return Way(len(entered), len(set(entered)), 1 + sum(file != other for file, other in pairs))


def ways() -> dict[str, Way]:
    """At O1 a forward and a step; at O2 a forward, and a step in which the gradients overflow."""
    return {**_at("O1", "step", 1.0), **_at("O2", "step with an overflow", float("inf"))}


def _at(level: str, name: str, factor: float) -> dict[str, Way]:
    """The ways of a forward and of a step whose loss is multiplied by `factor`."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step(factor: float = 1.0) -> None:
        optimizer.zero_grad()
        loss = model(x).float().sum() * factor
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    ways = {f"{level} forward": way_of(lambda: model(x))}
    ways[f"{level} {name}"] = way_of(lambda: step(factor))
    amp.deactivate()
    return ways


def report(options: Namespace) -> Iterator[str]:
    """A row for each way."""
    ways_by_name = alone(ways, environment={"AMPATCH_NATIVE": "0"})
    rows = [[name, *map(str, way)] for name, way in ways_by_name.items()]
    yield table(["", "calls", "files", "changes of file"], rows)
