"""Many small models under management: time and memory.  `scale.py` prints it."""

from __future__ import annotations

import functools
import gc
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from workers import alone, best, seconds, table

import ampatch as amp

SETTINGS = {"dtype": torch.bfloat16, "loss_scale": "dynamic", "verbosity": 0}


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers, four parameter tensors, and SGD."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def train(pair: tuple[nn.Module, torch.optim.Optimizer], inputs: Tensor) -> None:
    """One training step."""
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
    pairs = [small() for _ in range(count)]
    inputs = torch.randn(2, 4)
    if together:
        models, optimizers = (list(some) for some in zip(*pairs, strict=True))
        opening = seconds(lambda: amp.initialize(models, optimizers, opt_level=level, **SETTINGS))
    else:
        times = [
            seconds(functools.partial(amp.initialize, *pair, opt_level=level, **SETTINGS))
            for pair in pairs
        ]
        opening = min(times[-5:])
    first = best(lambda: train(pairs[0], inputs))
    for pair in pairs:
        train(pair, inputs)
    later = best(lambda: train(pairs[0], inputs))
    with torch.no_grad():
        evaluation = best(lambda: pairs[0][0](inputs))
    zeroing = best(pairs[0][0].zero_grad)
    return [opening, first, later, evaluation, zeroing, seconds(amp.deactivate)]


def bytes_each(count: int, level: str, size: Callable[[], int]) -> list[float]:
    """Bytes per session, of what `size` measures: opened, and once all have trained."""
    if size is traced:
        tracemalloc.start()
    pairs = [small() for _ in range(count)]
    inputs = torch.randn(2, 4)
    pair = small()
    amp.initialize(*pair, opt_level=level, **SETTINGS)  # what there is once per process
    train(pair, inputs)
    gc.collect()
    before = size()
    for pair in pairs:
        amp.initialize(*pair, opt_level=level, **SETTINGS)
    gc.collect()
    opened = size()
    for pair in pairs:
        train(pair, inputs)
    gc.collect()
    return [(opened - before) / count, (size() - before) / count]


def traced() -> int:
    """Bytes of Python's objects."""
    return tracemalloc.get_traced_memory()[0]


def resident() -> int:
    """Bytes of the process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def sessions(_: int) -> Iterator[str]:
    """Tables of time, each model in a session of its own and all in one, and of memory."""
    asked = ["training step", "the same, all in use", "evaluation", "`model.zero_grad()`"]
    for together, title, opening in (
        (False, "a session each", "last `initialize`"),
        (True, "all in one session", "`initialize`"),
    ):
        rows = []
        for level in ("O1", "O2"):
            for count in (1, 250, 500, 1000):
                times = alone(with_open, count, level, together)
                rows.append([level, count, *[f"{x * 1e3:.3f}" for x in times]])
        yield f"### Many small models, {title}\n\nMilliseconds.\n"
        yield table(["", "models", opening, *asked, "`deactivate()`"], rows)
    yield (
        "### Memory of a session\n\n"
        "Kilobytes for each of 1000, with gradients and all else that training makes.\n"
    )
    head = ["", "Python, opened", "Python, trained", "resident, opened", "resident, trained"]
    rows = []
    for level in ("O1", "O2"):
        found = [x for size in (traced, resident) for x in alone(bytes_each, 1000, level, size)]
        rows.append([level, *[f"{x / 1024:.1f}" for x in found]])
    yield table(head, rows)
