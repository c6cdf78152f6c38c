"""What grows with what: the time of `initialize`, and of all else with many models in use.

Every figure comes from a process of its own, in CPU time of one thread.  Growth is
linear where the figure per tensor, or per session, stays the same down a column.
"""

from __future__ import annotations

import functools
import gc
import tracemalloc
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from measuring import alone, best, seconds, table
from tasks import TASKS
from torch import Tensor, nn

import ampatch as amp

LEVELS = ("O1", "O2")
SETTINGS: dict[str, Any] = {"dtype": torch.bfloat16, "loss_scale": "dynamic", "verbosity": 0}
Pair = tuple[nn.Module, torch.optim.Optimizer]


def opening(options: Namespace) -> Iterator[str]:
    """Milliseconds of coming in and of going out, by number of parameter tensors."""
    rows = []
    for name in ("100 tensors", "1000 tensors", "10000 tensors"):
        found = [alone(_in_and_out, name, level) for level in LEVELS]
        rows.append([name, *[f"{x * 1e3:.1f}" for pair in found for x in pair]])
    yield table(
        ["", *[f"{one} `{c}`" for one in LEVELS for c in ("initialize", "deactivate")]], rows
    )


def _in_and_out(name: str, level: str) -> tuple[float, float]:
    [model] = TASKS[name]().modules
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    enter = functools.partial(amp.initialize, model, optimizer, opt_level=level, **SETTINGS)
    times = [(seconds(enter), seconds(amp.deactivate)) for _ in range(5)]
    return min(one for one, _ in times), min(other for _, other in times)


def _small() -> Pair:
    """Two layers, four parameter tensors, and SGD."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def _train(pair: Pair, inputs: Tensor) -> None:
    model, optimizer = pair
    optimizer.zero_grad()
    with amp.scale_loss(model(inputs).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def with_open(count: int, level: str, together: bool) -> list[float]:
    """Seconds with `count` models under management.

    Of the last `initialize` (of all, if together); of a training step, before and after
    all models have trained; of an evaluation; of `model.zero_grad()`; of `deactivate()`.
    """
    pairs, inputs = [_small() for _ in range(count)], torch.randn(2, 4)
    given = [tuple(map(list, zip(*pairs)))] if together else pairs
    calls = [functools.partial(amp.initialize, *one, opt_level=level, **SETTINGS) for one in given]
    opened = min([seconds(call) for call in calls][-5:])
    first = best(lambda: _train(pairs[0], inputs))
    for pair in pairs:
        _train(pair, inputs)
    later = best(lambda: _train(pairs[0], inputs))
    with torch.no_grad():
        evaluation = best(lambda: pairs[0][0](inputs))
    return [opened, first, later, evaluation, best(pairs[0][0].zero_grad), seconds(amp.deactivate)]


def bytes_each(count: int, level: str) -> tuple[float, float]:
    """Bytes of Python's objects per session: opened, and once all have trained."""
    tracemalloc.start()
    pairs, inputs, pair = [_small() for _ in range(count)], torch.randn(2, 4), _small()
    amp.initialize(*pair, opt_level=level, **SETTINGS)  # what there is once per process
    _train(pair, inputs)
    before = _traced()
    for pair in pairs:
        amp.initialize(*pair, opt_level=level, **SETTINGS)
    opened = _traced()
    for pair in pairs:
        _train(pair, inputs)
    return (opened - before) / count, (_traced() - before) / count


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def sessions(options: Namespace) -> Iterator[str]:
    """Time, each model in a session of its own and all in one, and memory."""
    asked = ["training step", "the same, all in use", "evaluation", "`model.zero_grad()`"]
    for together, title, first in (
        (False, "a session each", "last `initialize`"),
        (True, "all in one session", "`initialize`"),
    ):
        rows = []
        for level in LEVELS:
            for count in options.counts:
                times = alone(with_open, count, level, together)
                rows.append([level, count, *[f"{x * 1e3:.3f}" for x in times]])
        head = ["", "models", first, *asked, "`deactivate()`"]
        yield f"### {title[0].upper()}{title[1:]}\n\nMilliseconds.\n\n{table(head, rows)}"
    count = max(options.counts)
    found = [(level, alone(bytes_each, count, level)) for level in LEVELS]
    rows = [[level, *(f"{x / 1024:.1f}" for x in pair)] for level, pair in found]
    head = ["", "opened", "trained"]
    yield f"### Memory\n\nKilobytes of Python's objects, each of {count}.\n\n{table(head, rows)}"
