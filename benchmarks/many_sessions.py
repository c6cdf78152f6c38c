"""Many small models under management: time and memory.  `scale.py` prints it."""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import Iterator
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


def bytes_each(count: int, level: str) -> list[float]:
    """Bytes per session: Python's, and resident; opened, and once all have trained."""
    pairs = [small() for _ in range(count)]
    inputs = torch.randn(2, 4)
    amp.initialize(*small(), opt_level=level, **SETTINGS)  # what there is once per process
    gc.collect()
    tracemalloc.start()
    python, resident = tracemalloc.get_traced_memory()[0], _resident()
    found: list[float] = []
    for pair in pairs:
        amp.initialize(*pair, opt_level=level, **SETTINGS)
    gc.collect()
    found += [tracemalloc.get_traced_memory()[0] - python, _resident() - resident]
    for pair in pairs:
        train(pair, inputs)
    gc.collect()
    found += [tracemalloc.get_traced_memory()[0] - python, _resident() - resident]
    return [size / count for size in found]


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


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
    yield "### Memory of a session\n\nKilobytes for each of 1000, weights of 160 bytes each; resident memory holds what the counting itself takes.\n"
    head = ["", "Python, opened", "resident, opened", "Python, trained", "resident, trained"]
    yield table(
        head,
        [
            [level, *[f"{x / 1024:.1f}" for x in alone(bytes_each, 1000, level)]]
            for level in ("O1", "O2")
        ],
    )
