"""What each function of the native part gives: a step's time with its twin in Python in its place.

In one process, in turns.  Above 1: the step takes that many times as long without the function.  A
function that gives less than 1.02 in every column is not worth its lines.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from measuring import table
from systems import How, make_evaluation, make_step
from tasks import SMALL, TASKS

import ampatch
from ampatch import native

COLUMNS = {
    f"{level}, {what}": (level, make)
    for level in ("O1", "O2")
    for what, make in (("training", make_step), ("evaluation", make_evaluation))
}
Place = tuple[ModuleType, str, Any]


def twins() -> dict[str, list[Place]]:
    """By the name of a native function: where ampatch has it, and what stands there without."""
    functions = {id(value): name for name, value in vars(native.part).items() if callable(value)}
    modules = [m for title, m in list(sys.modules.items()) if title.startswith("ampatch.")]
    places_of: dict[str, list[Place]] = {}
    for module in modules:
        names = [name for name, value in vars(module).items() if id(value) in functions]
        twin = vars(_without_native(module)) if names else {}
        for name in names:
            function = vars(module)[name]
            if twin[name] is not function:  # it is chosen here, and others import it from here
                places_of[functions[id(function)]] = [
                    (holder, key, twin[name])
                    for holder in modules
                    for key, value in vars(holder).items()
                    if value is function
                ]
    return places_of


def _without_native(module: ModuleType) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with mock.patch.object(native, "part", None):
        spec.loader.exec_module(again)
    return again


def _seconds(step: Callable[[], None], steps: int) -> float:
    begin = time.process_time()
    for _ in range(steps):
        step()
    return time.process_time() - begin


def ratio(step: Callable[[], None], places: list[Place], rounds: int, seconds: float) -> float:
    """The median of a round's time without the native function over that with it."""
    steps = max(1, round(seconds / _seconds(step, 1)))
    ratios = []
    for _ in range(rounds):
        with_it = _seconds(step, steps)
        patches = [mock.patch.object(*place) for place in places]
        for patch in patches:
            patch.start()
        without = _seconds(step, steps)
        for patch in patches:
            patch.stop()
        ratios.append(without / with_it)
    return statistics.median(ratios)


def report(options: Namespace) -> Iterator[str]:
    """A row for each function, with geometric means over the models."""
    if native.part is None:
        sys.exit("The native part is not active: ampatch build, AMPATCH_NATIVE=1.")
    places_of = twins()
    rows: dict[str, list[float]] = {name: [] for name in sorted(places_of)}
    for level, make in COLUMNS.values():
        ratios: dict[str, list[float]] = {name: [] for name in places_of}
        for model in options.models or SMALL:
            torch.manual_seed(0)
            step = make(TASKS[model](), level, How(getattr(torch, options.dtype)))
            for _ in range(20):
                step()
            for name, places in places_of.items():
                ratios[name].append(ratio(step, places, options.rounds, options.seconds))
            ampatch.deactivate()
        for name, values in ratios.items():
            rows[name].append(statistics.geometric_mean(values))
    yield table(
        ("function", *COLUMNS),
        [(name, *(f"{value:.3f}" for value in values)) for name, values in rows.items()],
    )
